#!/bin/sh
# Connects one path to an NVMe-oF subsystem so that a target that goes away becomes an error within seconds.
#
#   connect.sh TRANSPORT ADDRESS PORT NQN        (as root; once for each path)
#
# The values suit kvtier's deadline of 5 s with one path. With two or more paths:
#   KEEP_ALIVE_S=1 IO_TIMEOUT_MS=4000 FAST_IO_FAIL_S=0
# `kvtier check --nvme PATH` says whether they are right, and which are where not.
set -eu
if [ $# -ne 4 ]; then
  echo "usage: $0 TRANSPORT ADDRESS PORT NQN" >&2
  exit 2
fi
keep_alive_s=${KEEP_ALIVE_S:-2}
io_timeout_ms=${IO_TIMEOUT_MS:-3000}
fast_io_fail_s=${FAST_IO_FAIL_S:-1}
scan_tries=20

nvme connect -t "$1" -a "$2" -s "$3" -n "$4" \
  --keep-alive-tmo="$keep_alive_s" --ctrl-loss-tmo=-1 --reconnect-delay=2

# Disks that the kernel has found behind a controller: nvme0n1, or nvme0c0n1 under multipath.
queues() {
  for queue in "$1"/nvme*n*/queue; do
    if [ -d "$queue" ]; then echo "$queue"; fi
  done
}

for controller in /sys/class/nvme/nvme*; do
  if [ "$(cat "$controller/subsysnqn")" != "$4" ]; then continue; fi
  # By sysfs, since older nvme-cli (2.3 of Debian 12) has no option for it, and newer ones leave a 0 out.
  echo "$fast_io_fail_s" >"$controller/fast_io_fail_tmo"
  tries=$scan_tries
  while [ -z "$(queues "$controller")" ] && [ "$tries" -gt 0 ]; do
    tries=$((tries - 1))
    sleep 0.5
  done
  sleep 1 # for further namespaces: they are found one after another
  for queue in $(queues "$controller"); do
    echo "$io_timeout_ms" >"$queue/io_timeout"
  done
done
