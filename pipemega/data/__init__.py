"""Data: from text to batches.

    corpus, tokenizer, prepare     text -> tokens -> Megatron's token files
    indexed, mapped_files          read and write token files
    samples, gpt_dataset, blending     GPT samples and weighted mixtures of datasets
    data_files                     which inputs exist, their tokenizer and vocabulary
    build_datasets                 the datasets of a run, from the config section `data`
    loader, sample_order, prefetch, workers    micro-batches of one data rank, resumable

Imports nothing: text can be prepared without torch.
"""
