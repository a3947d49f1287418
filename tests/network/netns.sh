#!/bin/bash
# Several hosts on one machine: network namespaces joined by veth pairs and a bridge. One host is cut off and healed.
#   sudo tests/network/netns.sh PYTHON     (from the project's folder; needs ip and root)
set -eu
python=${1:-python3}
folder=$(mktemp -d)
export PYTHONPATH=$PWD
hosts="flhub fla flb"
clean() {
    for host in $hosts; do
        ip netns pids $host 2>/dev/null | xargs -r kill -9 2>/dev/null || true
        ip netns del $host 2>/dev/null || true
    done
    ip link del flbr 2>/dev/null || true
    rm -rf "$folder"
}
trap clean EXIT
ip link add flbr type bridge
ip link set flbr up
number=1
for host in $hosts; do
    ip netns add $host
    ip link add $host-out type veth peer name eth0 netns $host
    ip link set $host-out master flbr up
    ip -n $host addr add 10.77.0.$number/24 dev eth0
    ip -n $host link set eth0 up
    ip -n $host link set lo up
    number=$((number + 1))
done
cat > "$folder/experiment.toml" <<TOML
name = "hosts"
rounds = 8
[data]
source = "digits"
partition = { name = "iid", clients = 4 }
[train]
epochs = 3
[cohort]
start_when = 2
deadline = "120s"
quorum = 1.0
[algorithm]
scaffold = {}
[run]
backend = "serial"
TOML
for site in 0 1; do
    cat > "$folder/site-$site.toml" <<TOML
[site]
name = "site-$site"
hosts = [$site, $((site + 2))]
[data]
source = "digits"
partition = { name = "iid", clients = 4 }
TOML
done
$python -m fedloom run "$folder/experiment.toml" --out "$folder/serial" --json -q > "$folder/serial.json" 2>/dev/null
cd "$folder"
ip netns exec flhub $python -m fedloom serve experiment.toml --listen 10.77.0.1:8443 --out run --json > net.json 2> hub.txt &
hub=$!
while [ "$(ls run/network/tokens 2>/dev/null | wc -l)" -lt 2 ]; do sleep 0.2; done
sleep 1
tokens=(run/network/tokens/*.token)
ip netns exec fla $python -m fedloom join https://10.77.0.1:8443 --site site-0.toml --token-file "${tokens[0]}" --wait > a.txt 2>&1 &
ip netns exec flb $python -m fedloom join https://10.77.0.1:8443 --site site-1.toml --token-file "${tokens[1]}" --wait > b.txt 2>&1 &
while ! ls run/cells/scaffold-1/round-*2.json > /dev/null 2>&1; do
    kill -0 $hub || { cat hub.txt; exit 1; }
    sleep 0.1
done
ip link set flb-out down
echo "host b is cut off"
sleep ${CUT:-20}
ip link set flb-out up
echo "host b is back"
wait $hub || { cat hub.txt; exit 1; }
$python - <<PY
import json
one, other = (json.load(open(name))["weights_sha256"] for name in ("serial.json", "net.json"))
print("the same SHA-256" if one == other else "ANOTHER RESULT", one, other)
raise SystemExit(one != other)
PY
