from featherbed.interop.torchrec.checkpoint import load_checkpoint as load_checkpoint
from featherbed.interop.torchrec.checkpoint import save_checkpoint as save_checkpoint
from featherbed.interop.torchrec.collections import (
    CompactEmbeddingBagCollection as CompactEmbeddingBagCollection,
)
from featherbed.interop.torchrec.collections import (
    CompactEmbeddingCollection as CompactEmbeddingCollection,
)
from featherbed.interop.torchrec.model import divided_tables as divided_tables
from featherbed.interop.torchrec.model import local_parts as local_parts
from featherbed.interop.torchrec.model import shard as shard
from featherbed.interop.torchrec.packing import pack as pack
