"""Pipeline parallelism at run time: the model as layers and stages, and the executor of plans.

Model: `spec` (LayerSpec), `module` (PipelineModule, Stage), `stage_partition`, `local_model`,
`buffers`, `gather_tensors`, `recompute`. Execution: `executor`, `execution_state`, `transport`,
`messages`, `microbatch_loss`, `split_backward`, `speculative`, `recorder`. Plans from the config:
`plan_selection`, `pipeline_graph`.
"""
