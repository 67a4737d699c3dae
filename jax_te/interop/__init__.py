"""Files of other libraries, read and written: `huggingface`, `megatron` and `torch`."""
