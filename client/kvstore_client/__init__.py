"""The kvstore client: what an inference worker installs. See `kvstore_client.client.KVStoreClient`."""
