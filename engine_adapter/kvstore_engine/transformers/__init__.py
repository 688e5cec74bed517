"""`generate()` of `transformers` with a stored prefix, for those who experiment without an engine.

from kvstore_engine.transformers import PrefixStore

with PrefixStore(model, target="127.0.0.1:7420") as store:
    output = store.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=50)
    print(store.last)
"""

from kvstore_engine.transformers.prefix_store import LastCall, PrefixStore

__all__ = ["LastCall", "PrefixStore"]
