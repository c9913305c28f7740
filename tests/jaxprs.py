"""What a traced program does with precision, read from its jaxpr: products, and roundings that a compiler may remove.

XLA for GPUs takes f32 -> bf16 -> f32 for f32 where both conversions are in one program
(`xla_allow_excess_precision`), also where data only moves in between. `jaxcomp.arrays` rounds before it
converts: the compiler may remove the conversion, the value is already rounded.
"""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

import jaxcomp
from jaxcomp.arrays import loses

PACKAGE = str(Path(jaxcomp.__file__).parent) + os.sep
PROTECTED = "_to_nearest"  # the name of the function that rounds, in a jaxpr


def jaxprs_in(value):
    """The jaxprs among parameters of an equation."""
    if isinstance(value, ClosedJaxpr):
        return [value.jaxpr]
    if isinstance(value, Jaxpr):
        return [value]
    if isinstance(value, tuple | list):
        return [found for each in value for found in jaxprs_in(each)]
    return []


def equations(jaxpr):
    """All equations, also of the functions inside."""
    for equation in jaxpr.eqns:
        yield equation
        for value in equation.params.values():
            for inner in jaxprs_in(value):
                yield from equations(inner)


def traced(function, *args):
    return jax.make_jaxpr(function)(*args).jaxpr


def imprecise_products(jaxpr):
    """Products and convolutions of floats that leave their precision to the backend, with where they stand."""
    found = []
    for equation in equations(jaxpr):
        if equation.primitive.name not in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
            continue
        precision = equation.params["precision"]
        both = precision if isinstance(precision, tuple) else (precision, precision)
        wide = all(is_float(var) and width(var) >= 32 for var in equation.invars)
        exact = jax.lax.Precision.HIGHEST, jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X6
        if wide and any(each not in exact for each in both):
            found.append(f"{equation.primitive.name}{tuple(var.aval.shape for var in equation.invars)}: {both}")
    return found


def is_float(var):
    return jnp.issubdtype(var.aval.dtype, jnp.floating)


def width(var):
    return 8 * var.aval.dtype.itemsize


# Equations that only move data, keep words as they are, or pick one of several numbers. Whatever else has a result in a
# narrow type computes it, and a compiler may postpone its rounding to where it is stored.
MOVES = {
    "abs",
    "all_gather",
    "all_gather_invariant",
    "all_to_all",
    "and",
    "bitcast_convert_type",
    "broadcast_in_dim",
    "ceil",
    "clamp",
    "concatenate",
    "copy",
    "copy_p",
    "cummax",
    "cummin",
    "dynamic_slice",
    "dynamic_update_slice",
    "expand_dims",
    "floor",
    "gather",
    "max",
    "min",
    "neg",
    "not",
    "optimization_barrier",
    "or",
    "pad",
    "ppermute",
    "proven_equal",
    "pvary",
    "ragged_all_to_all",
    "reduce_max",
    "reduce_min",
    "reshape",
    "rev",
    "round",
    "scatter",
    "select_n",
    "shift_left",
    "shift_right_arithmetic",
    "shift_right_logical",
    "sign",
    "slice",
    "sort",
    "split",
    "squeeze",
    "stop_gradient",
    "transpose",
    "xor",
}
KNOWN = "known"  # label of constants, which compilers compute exactly


class Roundings:
    """Follows values that were converted to a narrower type without protection, and notes where they become wide."""

    def __init__(self, arithmetic):
        self.found, self.arithmetic = set(), arithmetic

    def run(self, jaxpr, given):
        """Labels of the results: where each was narrowed, or None. given: those of the arguments."""
        labels = dict(zip(jaxpr.invars, given, strict=True))
        read = lambda var: KNOWN if isinstance(var, Literal) else labels.get(var)
        for equation in jaxpr.eqns:
            ins = [read(var) for var in equation.invars]
            outs = self.one(equation, ins)
            labels.update(zip(equation.outvars, outs, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def one(self, equation, ins):
        name, outs = equation.primitive.name, equation.outvars
        if ins and all(each == KNOWN for each in ins):
            return [KNOWN] * len(outs)
        label = next((each for each in ins if each not in (None, KNOWN)), None)
        if name == "convert_element_type":
            source, target = equation.invars[0], outs[0]
            if not (is_float(source) and is_float(target)):
                return [None]
            a, b = source.aval.dtype, target.aval.dtype
            if label is not None and loses(b, a):  # becomes wider
                self.found.add(f"{label} -> {b}")
            if loses(a, b):
                return [f"{a} -> {b} {list(target.aval.shape)} ({where(equation)})"]
            return [None if loses(b, a) else label]
        if equation.params.get("name") == PROTECTED:
            return [None] * len(outs)
        inner = self.inside(equation, ins)
        if inner is not None:
            return inner
        narrow = lambda var: is_float(var) and width(var) < 32
        moved = name in MOVES
        if self.arithmetic and ins and not moved and outs and narrow(outs[0]):
            if label is not None:
                self.found.add(f"{label} -> {name}")
            return [f"{outs[0].aval.dtype} {name} {list(outs[0].aval.shape)} ({where(equation)})"] * len(outs)
        return [label if moved or narrow(var) else None for var in outs]

    def inside(self, equation, ins):
        """Labels of the results of an equation with functions inside; None for one without."""
        name, params = equation.primitive.name, equation.params
        if name == "cond":
            return either(*(self.run(branch, ins[1:]) for branch in jaxprs_in(params["branches"])))
        if name == "while":
            (body,), consts = jaxprs_in(params["body_jaxpr"]), params["cond_nconsts"]
            own, carry = ins[consts : consts + params["body_nconsts"]], ins[consts + params["body_nconsts"] :]
            (condition,) = jaxprs_in(params["cond_jaxpr"])
            for _ in range(3):
                carry = either(carry, self.run(body, [*own, *carry]))
            self.run(condition, [*ins[:consts], *carry])
            return carry
        if name == "scan":
            (body,) = jaxprs_in(params["jaxpr"])
            if "ft_in" in params:  # JAX 0.12
                consts, carries, _ = map(len, params["ft_in"].unpack())
            else:
                consts, carries = params["num_consts"], params["num_carry"]
            own, carry, xs = ins[:consts], ins[consts : consts + carries], ins[consts + carries :]
            for _ in range(3):
                outs = self.run(body, [*own, *carry, *xs])
                carry = either(carry, outs[:carries])
            return [*carry, *outs[carries:]]
        for value in params.values():
            for body in jaxprs_in(value):
                if len(body.invars) == len(ins) and len(body.outvars) == len(equation.outvars):
                    return self.run(body, ins)
        return None


def either(*labels):
    """Of values that may come from one or the other: a rounding, if any has one."""
    pick = lambda column: next((each for each in column if each not in (None, KNOWN)), None)
    return [KNOWN if set(column) == {KNOWN} else pick(column) for column in zip(*labels, strict=True)]


def where(equation):
    """File and line of the package where an equation was made."""
    traceback = equation.source_info.traceback
    for frame in traceback.frames if traceback else ():
        if PACKAGE in frame.file_name:
            return f"{frame.file_name.rsplit(PACKAGE, 1)[-1]}:{frame.line_num}"
    return "?"


def lost_roundings(jaxpr, arithmetic=False):
    """Conversions to a narrower float and back, which a compiler may leave out; arithmetic: and sums and products of
    narrow floats from which one computes on, before which a compiler may not round."""
    roundings = Roundings(arithmetic)
    roundings.run(jaxpr, [None] * len(jaxpr.invars))
    return sorted(roundings.found)
