#!/bin/bash
# Starts one node of a cluster in a container. The arguments up to the folder are those of vLLM's run_cluster.sh.
#
#   bash run_cluster.sh IMAGE HEAD_ADDRESS --head|--worker HF_HOME [container options...] -- MODEL [serve flags...]
#
# On the head (node 0), and on node 1:
#
#   bash run_cluster.sh shardline 10.0.0.1 --head /data/hf -- Qwen/Qwen3-32B -tp 8 -dp 2 --nnodes 2 --host 10.0.0.1
#   bash run_cluster.sh shardline 10.0.0.1 --worker /data/hf -- Qwen/Qwen3-32B -tp 8 -dp 2 --nnodes 2 --node-rank 1
#
# The join token is SHARDLINE_JOIN_TOKEN, else the file ~/.config/shardline/join-token, which --head creates. Copy it to
# the other nodes. COMMAND=doctor runs `shardline doctor` with the same flags, CONTAINER_TOOL=podman uses podman.
set -euo pipefail

usage() {
    echo "usage: $0 IMAGE HEAD_ADDRESS --head|--worker HF_HOME [container options...] -- MODEL [serve flags...]" >&2
    exit 2
}

[ $# -ge 4 ] || usage
image=$1 head_address=$2 role=$3 hf_home=$4
shift 4
[ "$role" = --head ] || [ "$role" = --worker ] || usage

options=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    options+=("$1")
    shift
done
[ $# -gt 0 ] || usage
shift
flags=("$@" --master-addr "$head_address")
if [ "$role" = --worker ]; then
    flags+=(--headless)
fi

token=$HOME/.config/shardline/join-token
if [ -n "${SHARDLINE_JOIN_TOKEN:-}" ]; then
    options+=(--env SHARDLINE_JOIN_TOKEN)
else
    if [ ! -e "$token" ]; then
        if [ "$role" = --worker ]; then
            echo "$0: copy $token of the head to this node, or set SHARDLINE_JOIN_TOKEN" >&2
            exit 2
        fi
        mkdir -p "$(dirname "$token")"
        (umask 077 && head -c 32 /dev/urandom | base64 | tr -d '\n=' > "$token")
        echo "$0: wrote $token; copy it to the other nodes" >&2
    fi
    options+=(--volume "$token:/run/secrets/join-token:ro")
    flags+=(--join-token-file /run/secrets/join-token)
fi
if [ -e /dev/nvidiactl ]; then
    options+=(--gpus all)
fi
if [ -e /dev/infiniband ]; then
    options+=(--device /dev/infiniband)
fi

# Ranks and nodes listen on ports of the host. NCCL needs /dev/shm, and RDMA needs memory that is locked.
exec "${CONTAINER_TOOL:-docker}" run --rm --init --name "shardline-${role#--}" --network host --ipc host \
    --ulimit memlock=-1 --ulimit nofile=65536 --stop-timeout 60 \
    --volume "$hf_home:/models" --env HF_HOME=/models --env HF_TOKEN \
    "${options[@]}" "$image" "${COMMAND:-serve}" "${flags[@]}"
