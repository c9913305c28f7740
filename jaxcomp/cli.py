"""`jaxcomp smoothness DATA ...`: the preprocessing pass on the command line; `jaxcomp plan`: what to exchange."""

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from jaxcomp.plan import command as plan
from jaxcomp.smoothness.estimate import FORMS, LOSSES
from jaxcomp.smoothness.preprocess import mean_lambda_max, preprocess
from jaxcomp.smoothness.sources import SPLITS, open_source
from jaxcomp.smoothness.store import form_of

__all__ = ["main"]


def parser() -> argparse.ArgumentParser:
    """The options of `jaxcomp`."""
    p = argparse.ArgumentParser(prog="jaxcomp", description="Gradient compression for JAX.")
    p.add_argument("--version", action="version", version=f"jaxcomp {version('jaxcomp')}, JAX {version('jax')}")
    commands = p.add_subparsers(dest="command", required=True, metavar="COMMAND")
    s = commands.add_parser(
        "smoothness",
        help="compute the smoothness matrices of local data",
        description="Computes the smoothness matrix of each worker's data and writes roots, diagonals and constants "
        "to one file. Interrupted, it goes on where it was when it is run again.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    s.add_argument("data", help="LIBSVM text (.xz, .bz2, .gz too), .npy, .npz (X, y) or .mat")
    s.add_argument("--out", required=True, help="file to write (.npz)")
    s.add_argument("--workers", type=int, required=True, help="parts that the rows are split into")
    s.add_argument("--loss", choices=LOSSES, default="logistic", help="loss of a row")
    s.add_argument("--l2", type=float, default=0.0, help="weight of |x|^2 / 2")
    s.add_argument("--form", choices=FORMS, default="dense", help="how a matrix is kept")
    s.add_argument("--rank", type=int, default=None, help="of --form low_rank")
    s.add_argument("--blocks", type=int, default=None, help="of --form block")
    s.add_argument("--split", choices=SPLITS, default="contiguous", help="how rows are dealt to workers")
    s.add_argument("--scale-rows", action="store_true", help="divide each row by its largest magnitude")
    s.add_argument("--seed", type=int, default=0, help="of the iid and dirichlet splits")
    s.add_argument("--concentration", type=float, default=0.5, help="of the dirichlet split")
    s.add_argument("--labels", default=None, help="labels (.npy), in place of those in the data")
    s.add_argument("--num-features", type=int, default=None, help="of LIBSVM text; without it the largest index")
    plan.add_parser(commands)
    for command in commands.choices.values():
        command.set_defaults(parser=command)
    return p


class Bar:
    """A progress line on a terminal; silence elsewhere."""

    def __init__(self):
        self.shown, self.live = 0.0, sys.stderr.isatty()

    def __call__(self, what: str, done: int, total: int) -> None:
        if not self.live or (time.monotonic() - self.shown < 0.1 and done != total):
            return
        self.shown = time.monotonic()
        filled = 24 * done // total if total else 0
        part = f"{'#' * filled}{'.' * (24 - filled)} {done:,} of {total:,} rows" if total else f"{done:,} rows"
        print(f"\r{what}: {part}\033[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.live and self.shown:
            print(file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; errors fit on one line."""
    o, unknown = parser().parse_known_args(arguments)
    if unknown:  # with the usage of the command, not of them all
        o.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if o.command == "plan":
        try:
            print(plan.run(o))
        except (ValueError, OSError) as error:
            print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
            return 2
        return 0
    bar = Bar()
    start = time.perf_counter()
    try:
        operator = preprocess(
            open_source(o.data, o.labels, num_features=o.num_features),
            o.out,
            workers=o.workers,
            loss=o.loss,
            l2=o.l2,
            form=o.form,
            split=o.split,
            scale=o.scale_rows,
            seed=o.seed,
            concentration=o.concentration,
            rank=o.rank,
            blocks=o.blocks,
            show=bar,
        )
    except (ValueError, ImportError, OSError, MemoryError) as error:
        bar.end()
        said = " ".join(str(error).split())
        print(f"error: {said if o.data in said else f'{o.data}: {said}'}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        bar.end()
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return 130
    bar.end()
    largest, whole = np.asarray(operator.lambda_max), mean_lambda_max(operator)
    mean = np.mean(operator.diag, -1)
    spread = np.max(operator.diag, -1)[mean > 0] / mean[mean > 0]  # a worker's own data may be zero
    print(
        f"{o.out}: {form_of(operator)}, {operator.diag.shape[0]} workers x {operator.diag.shape[1]} entries in "
        f"{time.perf_counter() - start:.1f} s\n"
        f"lambda_max of the workers {largest.min():.4g} .. {largest.max():.4g}, of the mean {whole:.4g}; "
        f"largest diagonal entry over mean {spread.min():.3g} .. {spread.max():.3g}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
