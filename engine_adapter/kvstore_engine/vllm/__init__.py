"""The plug for vLLM: a persistent prefix cache behind `--kv-transfer-config`. See docs/engines/vllm.md.

connector.py   what vLLM calls, in two halves
scheduler.py   the half in vLLM's scheduler: looks prefixes up, says what is to be loaded and saved
worker.py      the half in each of vLLM's workers: moves the blocks
placement.py   where the KV of 128 tokens lies in a worker's memory
identity.py    what the KV is interchangeable with: a namespace for each worker
messages.py    what the two halves tell each other
metrics.py     statistics, through vLLM's own hooks
"""

from kvstore_engine.vllm.connector import KVStoreConnector

__all__ = ["KVStoreConnector"]
