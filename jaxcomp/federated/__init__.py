"""Training by members who come and go, on the host: one server, any transport that carries bytes.

Round t, with theta the point of the server and s what members know of it:

    1.  the server opens the round for those who are there: `Server.open` makes a `Task` for each
    2.  member i reaches theta_i from s by steps of its own, and sends C_k(e_i + s - theta_i): `Member.answer`
    3.  what arrives is checked and kept: `Server.receive`
    4.  `Server.close`:  theta <- outer(theta, sum_i N_i clip(C_k(..)) / sum_i N_i) over those who arrived
                         s     <- s + C(theta - s), sent down as one message for all

k follows the data volumes N_i of the members of the round (DAGC). `Rounds` and `Participant` carry it over a transport
of `jc.transports`, with a quorum and a grace time; `flower` carries it over Flower.

The package is imported by name, `from jaxcomp import federated`; nothing else in jaxcomp imports it.

**Nothing is lost.** A member forgets what it sent only once it is told that it was used: it keeps on disk what it would
remember if its message is used, and what if it is not. What the server clips away comes back, split so that both parts
add up exactly. Who leaves sends all that it remembers, which the server then uses like differences. So

    sum of memories + what is on its way + what was used

stays the same, as exact fractions, over every death, return, delay, refusal, clipping and leaving.

**Nobody is let in by what they claim.** Volumes are those of the roster. A message is used at most once, only from who
was asked, of the right size, with at most as many bytes and entries as were allowed, finite, and at most at the median
norm. Who says that it leaves may hand over a whole memory, once, after an answer that was used, and weighs no more for
it in any round.
"""

from jaxcomp.federated import flower
from jaxcomp.federated.checkpoint import load, save
from jaxcomp.federated.journal import Journal, replay
from jaxcomp.federated.member import Member, OutOfStep
from jaxcomp.federated.messages import Answer, Refused, Task, largest, parted
from jaxcomp.federated.roster import RoundResult
from jaxcomp.federated.rounds import Participant, Rounds
from jaxcomp.federated.server import Server

__all__ = [
    "Answer",
    "Journal",
    "Member",
    "OutOfStep",
    "Participant",
    "Refused",
    "RoundResult",
    "Rounds",
    "Server",
    "Task",
    "flower",
    "largest",
    "load",
    "parted",
    "replay",
    "save",
]
