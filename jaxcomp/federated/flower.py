"""`jaxcomp.federated` over Flower: a server strategy and a client mod whose messages are bytes of `jc.wire`, both ways.

    server   @app.main()   FlowerRounds(server, names).start(grid, rounds)           in place of a strategy
    client   ClientApp(mods=[members_mod(folder)])                             around any train function

Flower brings the transport, TLS, and a key for each node (`--ssl-certfile`, `--enable-supernode-auth`,
`--auth-supernode-private-key`); a reply is of the node that Flower says it is of, whatever stands in it. The train
function sees what it sees with any strategy: an `ArrayRecord`, which it trains and returns.

Flower is imported when it is called, not before (`pip install "jaxcomp[federated]"`, in a clone `".[federated]"`).
Set FLWR_TELEMETRY_ENABLED=0 and FLWR_DISABLE_UPDATE_CHECK=1 where nothing is to be looked up outside.
"""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxcomp.federated.member import Member, OutOfStep
from jaxcomp.federated.messages import Answer, Task, largest
from jaxcomp.federated.roster import RoundResult
from jaxcomp.federated.server import Server

__all__ = ["RECORD", "FlowerRounds", "members_mod"]

RECORD = "jaxcomp"
ARRAYS = "arrays"
HEAD_BYTES = 2**16  # of a message, at most, besides the point: other fields of the task, and what Flower adds


class FlowerRounds:
    """A Flower strategy: the rounds of a `Server`, with whoever is connected.

    Args:
        server: with the roster of those who may take part.
        names: the grid -> {id of a node: member of the roster}, of the nodes that are connected now.
        deadline: seconds until a round goes on without those who have not answered; what comes later is used in the
            next one, or not, as the server's `late` says.
        choose: members who are there -> those who are asked.
        least: members without whom a round does not begin; it is waited for them.
        poll: seconds between two looks for replies.

    Raises:
        ValueError: the server weighs answers by their tokens.
    """

    def __init__(
        self,
        server: Server,
        names: Callable[[Any], Mapping[int, Hashable]],
        *,
        deadline: float = 60.0,
        choose: Callable[[set[Any]], Iterable[Any]] = sorted,
        least: int = 1,
        poll: float = 0.2,
    ):
        if server.weights != "volumes":
            raise ValueError(
                "federated: over Flower weights must be 'volumes', as answers do not say their tokens there; "
                f"got {server.weights!r}"
            )
        self.server, self.names, self.choose = server, names, choose
        self.deadline, self.least, self.poll = deadline, least, poll
        self._awaited: dict[str, Any] = {}  # id of a message -> the member that it went to

    def start(self, grid: Any, num_rounds: int) -> Iterator[RoundResult]:
        """Rounds, one after the other, as they are closed.

        Raises:
            ValueError: the model is too large for a message of Flower, which carries the whole of it to who joins. No
                message was sent then.
        """
        from flwr.common import GRPC_MAX_MESSAGE_LENGTH  # pyright: ignore[reportMissingImports]

        size = self.server.point.size
        needed = 4 * size + HEAD_BYTES
        if needed > GRPC_MAX_MESSAGE_LENGTH:
            most = (GRPC_MAX_MESSAGE_LENGTH - HEAD_BYTES) // 4
            raise ValueError(
                f"flower: the server's point has {size:,} entries, which take a message of {needed:,} bytes; Flower "
                f"carries at most {GRPC_MAX_MESSAGE_LENGTH:,}: train at most {most:,} parameters, such as adapters"
            )
        return self._rounds(grid, num_rounds)

    def _rounds(self, grid: Any, num_rounds: int) -> Iterator[RoundResult]:
        for _ in range(num_rounds):
            nodes = {member: node for node, member in self._here(grid).items()}
            tasks = self.server.open(self.choose(set(nodes)))
            sent = [self._push(grid, nodes[member], member, task) for member, task in tasks.items()]
            end = time.monotonic() + self.deadline
            while self._awaited.keys() & set(sent) and time.monotonic() < end:
                self._pull(grid)
                time.sleep(self.poll)
            self._pull(grid)
            yield self.server.close()

    def _here(self, grid: Any) -> Mapping[int, Hashable]:
        end = time.monotonic() + self.deadline
        while len(here := self.names(grid)) < self.least and time.monotonic() < end:
            time.sleep(self.poll)
        return here

    def _push(self, grid: Any, node: int, member: Any, task: Task) -> str:
        from flwr.app import ConfigRecord, Message, RecordDict  # pyright: ignore[reportMissingImports]

        message = Message(RecordDict({RECORD: ConfigRecord(task._asdict())}), node, "train")
        number = next(iter(grid.push_messages([message])), "")
        if number:
            self._awaited[number] = member
        else:
            self.server.lost(member)
        return number

    def _pull(self, grid: Any) -> None:
        for reply in grid.pull_messages(list(self._awaited)) if self._awaited else ():
            member = self._awaited.pop(reply.metadata.reply_to_message_id, None)
            if member is not None:
                self._take(member, reply)

    def _take(self, member: Any, reply: Any) -> None:
        """A node replies to a message once: after that nothing more of this round will come from it."""
        if not reply.has_error():
            record = dict(reply.content.config_records.get(RECORD, {}))
            if record.get("behind") is True:
                self.server.behind(member)
            else:
                fields = Answer._field_defaults | {"round": 0, "data": b""} | record
                self.server.receive(member, Answer(*(fields[name] for name in Answer._fields)))
        if member in self.server.missing():
            self.server.lost(member)


def members_mod(
    folder: Path | str,
    *,
    like: Mapping[str, Any] | None = None,
    name: Callable[[Any], str] = lambda context: str(context.node_config.get("partition-id", context.node_id)),
    compress: Callable[[np.ndarray, int], Any] = largest,
) -> Callable[[Any, Any, Callable[[Any, Any], Any]], Any]:
    """A mod of Flower's `ClientApp`, around a train function as for any strategy of Flower.

    The train function gets `message.content["arrays"]`, and returns its own arrays in the first `ArrayRecord` of its
    reply. A reply with `ConfigRecord({"leaves": True})` named "jaxcomp" and without arrays says goodbye: the member
    hands over all that it remembers.

    Args:
        folder: where the memory of this node is kept.
        like: names and arrays of the parameters, in the order of the server's vector; None: one array named "point".
        name: of the member, from Flower's context: its file is client-NAME.npz.
        compress: as for `Member`.
    """
    folder = Path(folder)

    def mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict  # pyright: ignore[reportMissingImports]

        if RECORD not in message.content.config_records:
            return call_next(message, context)
        folder.mkdir(parents=True, exist_ok=True)
        task = Task(**message.content.config_records[RECORD])
        member = Member(folder / f"client-{name(context)}.npz", compress)
        try:
            point = member.take(task)
        except OutOfStep:
            return Message(RecordDict({RECORD: ConfigRecord({"behind": True})}), reply_to=message)
        message.content[ARRAYS] = ArrayRecord(_arrays(point, like))
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        if reply.content.config_records.get(RECORD, {}).get("leaves"):
            answer = member.leave(task)
        else:
            trained = next(iter(reply.content.array_records.values())).to_numpy_ndarrays()
            answer = member.answer(task, np.concatenate([np.ravel(x) for x in trained]))
        for key in list(reply.content.array_records):
            del reply.content[key]
        reply.content[RECORD] = ConfigRecord(answer._asdict())
        return reply

    return mod


def _arrays(point: np.ndarray, like: Mapping[str, Any] | None) -> Any:
    from collections import OrderedDict

    from flwr.app import Array  # pyright: ignore[reportMissingImports]

    if like is None:
        return OrderedDict(point=Array(point))
    ends = np.cumsum([np.size(x) for x in like.values()])[:-1]
    parts = zip(like.items(), np.split(point, ends), strict=True)
    return OrderedDict((key, Array(part.reshape(np.shape(x)).astype(np.asarray(x).dtype))) for (key, x), part in parts)
