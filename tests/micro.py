"""Overrides of a model so small that a run of it takes a second."""

MICRO = (
    "model.hidden_size=16",
    "model.ffn_dim=32",
    "model.word_embed_proj_dim=16",
    "model.num_hidden_layers=1",
    "model.num_attention_heads=2",
    "data.block_size=32",
    "train.batch_size=2",
    "train.eval_batch_size=2",
    "train.max_steps=4",
    "train.eval_every=2",
    "train.eval_batches=1",
    "train.warmup_steps=1",
    "wandb.mode=disabled",
)
