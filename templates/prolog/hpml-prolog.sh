#!/bin/sh
# Slurm prolog of a node: leaves who a job belongs to, and its GPUs, in /run/hpml/jobs/<jobid>.json,
# where `hpml export node` looks. See docs/prolog.md.
#
# It asks no Slurm command, takes milliseconds (5 s at the very most), prints nothing and always
# ends with status 0: a node is drained, or a job held, for nothing that happens here.

PATH=/usr/sbin:/usr/bin:/sbin:/bin # a prolog has none
LC_ALL=C
export PATH LC_ALL
RUN=${HPML_RUN:-/run/hpml}
# One line per GPU in the order of `slurmd -G`: minor number, UUID or PCI address. Needed only where
# gres.conf does not list /dev/nvidia0, /dev/nvidia1, … in this order.
GPUS=${HPML_GPUS:-/etc/hpml/gpus}

if [ "${1-}" != write ]; then
    if command -v timeout >/dev/null 2>&1; then
        timeout -s KILL 5 /bin/sh "$0" write </dev/null >/dev/null 2>&1
    else
        /bin/sh "$0" write </dev/null >/dev/null 2>&1
    fi
    exit 0
fi

# Prints a JSON string of at most 200 bytes, without control characters.
string() {
    value=$(printf '%.200s' "$1" | tr -d '\000-\037\177' | sed 's/[\\"]/\\&/g') || value=
    printf '"%s"' "$value"
}

# Prints a number as JSON; what is none is the second argument.
number() {
    case $1 in
    '' | *[!0-9]* | ???????????*) printf '%s' "$2" ;;
    *) printf '%s' "$1" ;;
    esac
}

# Prints the name of the GPU at a position of Slurm's list, by /etc/hpml/gpus.
gpu_at() {
    [ -r "$GPUS" ] || { printf '%s' "$1"; return 0; }
    sed -n -e '/^[[:space:]]*#/d' -e '/^[[:space:]]*$/d' -e p -- "$GPUS" |
        sed -n "$(($1 + 1)){s/[[:space:]].*//;p;q;}"
}

# Prints the JSON list of the job's GPUs; null: not known.
gpus() {
    case ${CUDA_VISIBLE_DEVICES-} in
    GPU-* | MIG-*) given=$CUDA_VISIBLE_DEVICES position=no ;; # Flags=env_uuid, Slurm 26.05 on
    *) given=${SLURM_JOB_GPUS-} position=yes ;;
    esac
    case $given in
    *[!A-Za-z0-9,/:.-]*) printf null; return ;;
    esac
    list=
    while [ -n "$given" ]; do
        one=${given%%,*}
        case $given in
        *,*) given=${given#*,} ;;
        *) given= ;;
        esac
        if [ "$position" = yes ]; then
            case $one in
            '' | *[!0-9]* | ?????*) printf null; return ;; # NoDevFiles
            esac
            one=$(gpu_at "$one")
        fi
        case $one in
        '' | *[!A-Za-z0-9/:._-]*) printf null; return ;;
        esac
        list="$list${list:+, }\"$one\""
    done
    printf '[%s]' "$list"
}

job=${SLURM_JOB_ID-}
case $job in
'' | *[!0-9]* | ???????????*) exit 0 ;;
esac

umask 022
[ -d "$RUN/jobs" ] || mkdir -p "$RUN/jobs" || exit 0
# Somebody else's directory could send what root writes anywhere.
# shellcheck disable=SC3067 # dash, bash and busybox have -O
[ ! -L "$RUN/jobs" ] && [ -O "$RUN/jobs" ] || exit 0
draft=$RUN/jobs/.$job.$$
rm -f "$draft"
set -C # never write through what lies there
if {
    printf '{"schema_version": 1, "jobid": "%s", "uid": ' "$job" &&
        number "${SLURM_JOB_UID-}" -1 &&
        printf ', "user": ' && string "${SLURM_JOB_USER-}" &&
        printf ', "account": ' && string "${SLURM_JOB_ACCOUNT-}" &&
        printf ', "partition": ' && string "${SLURM_JOB_PARTITION-}" &&
        printf ', "qos": ' && string "${SLURM_JOB_QOS-}" &&
        printf ', "name": ' && string "${SLURM_JOB_NAME-}" &&
        printf ', "array_job": ' && string "${SLURM_ARRAY_JOB_ID-}" &&
        printf ', "array_task": ' && string "${SLURM_ARRAY_TASK_ID-}" &&
        printf ', "start": ' && number "${SLURM_JOB_START_TIME-}" "$(date +%s)" &&
        printf ', "end": ' && number "${SLURM_JOB_END_TIME-}" 0 &&
        printf ', "gpus": ' && gpus &&
        printf '}\n'
} >"$draft" && mv -fT "$draft" "$RUN/jobs/$job.json"; then
    exit 0
fi
rm -f "$draft"
exit 0
