"""Measures links and machines, predicts the seconds of a step, and advises; the advice may be not to compress.

links.py        the model of a link, and its fit to measured sizes
programs.py     the collectives of a traced program, and the program without them
candidates.py   what is compared: what it sends, what it loses
facts.py        what was measured, and its file
predict.py      seconds of a step, from measured parts: a row for each candidate
advise.py       the choice among the rows, in words and as a table
clock.py        times that all processes agree on
measure.py      links, encoding, overlap and whole steps of this machine
planning.py     `jc.plan`: all of these in their order
recommend.py    `jc.recommend`: the same without measuring
command.py      `jaxcomp plan`: both on the command line
watch.py        whether a plan still holds, while it is used
"""

__all__: list[str] = []
