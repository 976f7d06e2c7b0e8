"""Every flag of the other engines' servers is taken, or answered with what takes its place."""

from __future__ import annotations

import pytest
import typer

from pegainfer.app.unserved import UNSERVED
from pegainfer.cli.commands import build_app

# Of vLLM 0.11, SGLang 0.5 and llama-server in late 2025.
VLLM = """
--model --task --runner --convert --tokenizer --tokenizer-mode --trust-remote-code --dtype --seed
--hf-config-path --allowed-local-media-path --allowed-media-domains --revision --code-revision
--rope-scaling --rope-theta --tokenizer-revision --max-model-len --quantization --enforce-eager
--max-seq-len-to-capture --max-logprobs --logprobs-mode --disable-sliding-window --disable-cascade-attn
--skip-tokenizer-init --enable-prompt-embeds --served-model-name --disable-async-output-proc --config-format
--hf-token --hf-overrides --pooler-config --override-pooler-config --logits-processor-pattern
--generation-config --override-generation-config --enable-sleep-mode --model-impl --logits-processors
--io-processor-plugin --load-format --download-dir --safetensors-load-strategy --model-loader-extra-config
--ignore-patterns --use-tqdm-on-load --pt-load-map-location --reasoning-parser
--distributed-executor-backend --pipeline-parallel-size --master-addr --master-port --nnodes --node-rank
--tensor-parallel-size --decode-context-parallel-size --data-parallel-size --data-parallel-rank
--data-parallel-start-rank --data-parallel-size-local --data-parallel-address --data-parallel-rpc-port
--data-parallel-backend --data-parallel-hybrid-lb --enable-expert-parallel --all2all-backend --enable-dbo
--enable-eplb --eplb-config --expert-placement-strategy --max-parallel-loading-workers
--ray-workers-use-nsight --disable-custom-all-reduce --worker-cls --worker-extension-cls --block-size
--gpu-memory-utilization --kv-cache-memory-bytes --swap-space --kv-cache-dtype --num-gpu-blocks-override
--enable-prefix-caching --prefix-caching-hash-algo --cpu-offload-gb --calculate-kv-scales
--kv-sharing-fast-prefill --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size
--limit-mm-per-prompt --media-io-kwargs --mm-processor-kwargs --mm-processor-cache-gb --mm-encoder-tp-mode
--interleave-mm-strings --skip-mm-profiling --enable-lora --enable-lora-bias --max-loras --max-lora-rank
--lora-extra-vocab-size --lora-dtype --max-cpu-loras --fully-sharded-loras --show-hidden-metrics-for-version
--otlp-traces-endpoint --collect-detailed-traces --max-num-batched-tokens --max-num-seqs
--max-num-partial-prefills --max-long-partial-prefills --cuda-graph-sizes --long-prefill-token-threshold
--num-lookahead-slots --scheduling-policy --enable-chunked-prefill --disable-chunked-mm-input
--scheduler-cls --disable-hybrid-kv-cache-manager --async-scheduling --stream-interval --kv-transfer-config
--kv-events-config --structured-outputs-config --additional-config --speculative-config --disable-log-stats
--enable-log-requests --host --port --uvicorn-log-level --disable-uvicorn-access-log --allow-credentials
--allowed-origins --allowed-methods --allowed-headers --api-key --lora-modules --chat-template
--chat-template-content-format --trust-request-chat-template --response-role --ssl-keyfile --ssl-certfile
--ssl-ca-certs --enable-ssl-refresh --ssl-cert-reqs --root-path --middleware --return-tokens-as-token-ids
--disable-frontend-multiprocessing --enable-request-id-headers --enable-auto-tool-choice
--exclude-tools-when-tool-choice-none --tool-call-parser --tool-parser-plugin --tool-server
--log-config-file --max-log-len --disable-fastapi-docs --enable-prompt-tokens-details
--enable-server-load-tracking --enable-force-include-usage --enable-tokenizer-info-endpoint
--enable-log-outputs --h11-max-incomplete-event-size --h11-max-header-count --log-error-stack --headless
--api-server-count --uds --default-chat-template-kwargs --guided-decoding-backend --compilation-config
--kv-offloading-size --optimization-level --attention-backend --config
"""
SGLANG = """
--host --port --model-path --tokenizer-path --tokenizer-mode --skip-tokenizer-init --load-format
--trust-remote-code --dtype --kv-cache-dtype --quantization --context-length --device --served-model-name
--chat-template --completion-template --is-embedding --revision --mem-fraction-static --max-running-requests
--max-total-tokens --chunked-prefill-size --max-prefill-tokens --schedule-policy --schedule-conservativeness
--page-size --tensor-parallel-size --tp --dp --stream-interval --stream-output --random-seed
--constrained-json-whitespace-pattern --watchdog-timeout --dist-timeout --download-dir --base-gpu-id
--log-level --log-level-http --log-requests --show-time-cost --enable-metrics --decode-log-interval
--api-key --file-storage-path --enable-cache-report --reasoning-parser --tool-call-parser
--data-parallel-size --dist-init-addr --nnodes --node-rank --json-model-override-args --lora-paths
--attention-backend --sampling-backend --grammar-backend --speculative-algorithm --disable-radix-cache
--disable-cuda-graph --cuda-graph-max-bs --cuda-graph-bs --enable-torch-compile --disable-overlap-schedule
--enable-mixed-chunk --enable-dp-attention --ep-size --admin-api-key --allow-auto-truncate --warmups
--skip-server-warmup
"""
LLAMA = """
--model --hf-repo --hf-file --hf-token --threads --threads-batch --ctx-size --n-predict --batch-size
--ubatch-size --keep --flash-attn --rope-scaling --rope-freq-base --cache-type-k --cache-type-v
--defrag-thold --parallel --mlock --no-mmap --numa --device --n-gpu-layers --gpu-layers --split-mode
--tensor-split --main-gpu --override-kv --no-warmup --lora --log-disable --log-file --verbose --seed --temp
--top-k --top-p --min-p --repeat-penalty --presence-penalty --frequency-penalty --grammar --json-schema
--cont-batching --no-context-shift --cache-prompt --host --port --path --no-webui --embedding --embeddings
--reranking --api-key --api-key-file --ssl-key-file --ssl-cert-file --timeout --threads-http --cache-reuse
--metrics --slots --props --slot-save-path --jinja --no-jinja --reasoning-format --reasoning-budget
--chat-template --chat-template-file --chat-template-kwargs --slot-prompt-similarity --alias --model-draft
--draft-max --pooling --kv-unified --swa-full --ctx-checkpoints --cpu-moe --n-cpu-moe --offline --fit --prio
--poll --cpu-mask --cpu-strict --models-dir --models-max
"""


@pytest.mark.parametrize("flags", [VLLM, SGLANG, LLAMA], ids=["vllm", "sglang", "llama-server"])
def test_no_flag_is_unknown(flags: str) -> None:
    params = typer.main.get_command(build_app()).commands["serve"].params  # type: ignore[attr-defined]
    served = {name for p in params for name in (*p.opts, *p.secondary_opts)}
    explained = {f"--{no}{name.replace('_', '-')}" for name in UNSERVED for no in ("", "no-")}
    assert len(flags.split()) > 70
    assert [flag for flag in flags.split() if flag not in served | explained] == []
