"""Measures links and machines, predicts the seconds of a step, and advises; the advice may be not to compress.

links.py        alpha-beta fits of collectives
predict.py      seconds of a step, from measured parts
candidates.py   what is compared: what it sends, what it loses
measure.py      links, encoding and overlap of this machine
offline.py      a program that exchanges, without its exchanges
trial.py        candidates that are run
advise.py       the ranked table, and what it advises
planning.py     `jc.plan`: all of these in their order
recommend.py    `jc.recommend`: the same without measuring
watch.py        whether a plan still holds, while it is used
"""

__all__: list[str] = []
