"""Measures links and machines, predicts the seconds of a step, and advises; the advice may be not to compress.

links.py        alpha-beta fits of collectives
predict.py      seconds of a step, from measured parts
candidates.py   what is compared: what it sends, what it loses
measure.py      links, encoding, gradients and overlap of this machine
advise.py       `jc.plan`: the ranked table
recommend.py    `jc.recommend`: the same without measuring
watch.py        whether a plan still holds, while it is used
scale.py        the same formulas for thousands of workers
"""

__all__: list[str] = []
