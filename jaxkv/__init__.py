"""jaxkv: an LLM's KV cache stored once across a mesh instead of once on each device.

host (numpy)                               device (jnp, shard_map)
cache.open -> cache.plan -> step.plan  ->  scan_layers(block, x, params, pool, plan)
cache.commit  <------------ new pool  <--  written once, after the last layer
"""

from jaxkv.cache import KVCache
from jaxkv.device.layers import (
    LayerKV,
    StagedRows,
    embed_tokens,
    last_rows,
    loop_layers,
    scan_layers,
    stage_loop,
    stage_scan,
)
from jaxkv.device.packing import PackedPlan, plan_specs, unpack_plan
from jaxkv.device.pool import KVPool, copy_pages, create_pool, write_rows
from jaxkv.device.regions import ShardGroup
from jaxkv.errors import (
    CapacityError,
    ClosedRequestError,
    JaxkvError,
    PageAccountingError,
    StalePlanError,
)
from jaxkv.host.buckets import Buckets
from jaxkv.host.chains import CacheStats
from jaxkv.host.namespace import Namespace
from jaxkv.host.request import Request
from jaxkv.host.step import Step
from jaxkv.plan import StepPlan
from jaxkv.spec import GQA, CacheSpec

__all__ = [
    "GQA",
    "Buckets",
    "CacheSpec",
    "CacheStats",
    "CapacityError",
    "ClosedRequestError",
    "JaxkvError",
    "KVCache",
    "KVPool",
    "LayerKV",
    "Namespace",
    "PackedPlan",
    "PageAccountingError",
    "Request",
    "ShardGroup",
    "StagedRows",
    "StalePlanError",
    "Step",
    "StepPlan",
    "copy_pages",
    "create_pool",
    "embed_tokens",
    "last_rows",
    "loop_layers",
    "plan_specs",
    "scan_layers",
    "stage_loop",
    "stage_scan",
    "unpack_plan",
    "write_rows",
]
