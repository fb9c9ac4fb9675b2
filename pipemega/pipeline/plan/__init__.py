"""Pipeline plans as data: instructions, messages, validation and simulation, without torch.

`instructions.py` defines `Plan`; `lowering.py` adds messages; `execution_order.py` and
`validate.py` prove that a plan is complete and cannot deadlock; `costs.py` and `simulate.py`
compute its timeline; `warmup.py` splits off the warm-up; `partition.py` divides layers into stages;
`deadlock_report.py` describes where ranks are when one does not answer.
"""
