"""HTTP in, server-sent events out: the process that clients talk to. No torch, no tokenizer."""
