"""Pipeline plans as data: instructions, messages, validation and simulation, without torch.

`instructions.py` defines `Plan`; `lowering.py` adds messages and splits off the warm-up;
`validate.py` proves that a plan is complete and cannot deadlock, and describes where ranks are when
one does not answer; `simulate.py` computes its timeline; `partition.py` divides layers into stages.
"""
