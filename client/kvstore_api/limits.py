"""Limits of the protocol, the same for client and server."""

HASH_BYTES = 32
MAX_CHAIN_BLOCKS = 65_536
MIN_BLOCK_BYTES = 1
MAX_BLOCK_BYTES = 64 << 20
MAX_STATE_BYTES = 64 << 20
MAX_STATE_NAME_BYTES = 256
MAX_SPEC_BYTES = 64 << 10  # a namespace's spec, serialized
BLOCK_TOKENS = 128

# A client with default options refuses messages over 4 MiB, so no message may come near that in either direction.
MAX_MESSAGE_BYTES = 4 << 20

# Block bytes in one frame. Measured with grpcio on 2 cores: 0.97 GB/s with 112 KiB frames, 1.3 with 256 KiB, 2.1 with 1 MiB.
MAX_FRAME_DATA_BYTES = 1 << 20

# A frame holds at most this many blocks, so that its positions and checksums stay small when blocks are tiny.
MAX_FRAME_BLOCKS = 4096
