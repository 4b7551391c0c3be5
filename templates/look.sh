# Look at a node, for `hpml init --probe`: changes nothing, and needs only sh, df, awk and sed. It
# prints one finding per line, separated by tabs, between two marks, so that a greeting of the login
# shell does no harm. `hpml_orchestrator/site/node_probe.py` reads what it prints.
# $1: directory of TmpFS; $2: `xml` where the hardware's description is wanted as well; $3: a new file
# in the records' directory, if the node should see that.
PATH=${PATH:-/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin}; export PATH; LC_ALL=C; export LC_ALL
tab=$(printf '\t')
place() { # name, directory
  test -d "$2" || return 0
  writable=no; test -w "$2" && writable=yes
  timeout -k 1 5 df -PTk "$2" 2>/dev/null | awk -v n="$1" -v d="$2" -v w="$writable" \
    'NR == 2 { printf "place\t%s\t%s\t%s\t%s\t%s\t%s\n", n, d, $2, $3, $5, w }'
}
echo '=== hpml look ==='
printf 'host\t%s\n' "$(uname -n)"
if test -n "$3"; then
  seen=no; test -e "$3" && seen=yes
  printf 'records\t%s\n' "$seen"
fi
place ram /dev/shm
for name in SLURM_TMPDIR TMPDIR $(env | sed -n 's/^\([A-Za-z0-9_]*SCRATCH[A-Za-z0-9_]*\)=.*/\1/p') \
  LOCALDIR LOCAL_TMPDIR JOBFS PBS_JOBFS BBPATH; do
  eval "value=\${$name:-}"
  case $value in /*) place "\$$name" "$value" ;; esac
done
place TmpFS "$1"
for directory in /tmp /scratch /local /localscratch /local_scratch /local/scratch /lscratch \
  /scratch/local /mnt/scratch /mnt/local /mnt/nvme /nvme /raid /raid/scratch /ssd; do
  place path "$directory"
done
for path in /sys/class/net/*; do
  name=${path##*/}
  case $name in lo|docker*|veth*|virbr*|br-*|cni*|flannel*|cali*|tap*|tun*) continue ;; esac
  case $name in dummy*|ifb*|sit*|'*') continue ;; esac
  state=$(cat "$path/operstate" 2>/dev/null)
  case $state in up|unknown) ;; *) continue ;; esac
  address=no; grep -q "^$name$tab" /proc/net/route 2>/dev/null && address=yes
  speed=$(cat "$path/speed" 2>/dev/null)
  printf 'interface\t%s\t%s\t%s\t%s\n' "$name" "${speed:-?}" "$(cat "$path/type")" "$address"
done
timeout -k 1 20 bash -lc 'type module >/dev/null 2>&1 && echo "modules yes"; module -t avail 2>&1' \
  </dev/null 2>/dev/null | sed 's/^/module\t/' | head -n 20000
if test "$2" = xml; then
  for program in lstopo-no-graphics lstopo; do
    command -v "$program" >/dev/null 2>&1 || continue
    echo '=== hpml topology ==='
    "$program" --disallowed --of xml - 2>/dev/null ||
      "$program" --whole-system --of xml - 2>/dev/null
    break
  done
fi
echo '=== hpml end ==='
