#!/bin/sh
# Slurm epilog of a node: removes what hpml-prolog.sh left, and what prologs that were killed left.
# Always ends with status 0.

PATH=/usr/sbin:/usr/bin:/sbin:/bin
LC_ALL=C
export PATH LC_ALL
RUN=${HPML_RUN:-/run/hpml}

if [ "${1-}" != remove ]; then
    if command -v timeout >/dev/null 2>&1; then
        timeout -s KILL 5 /bin/sh "$0" remove </dev/null >/dev/null 2>&1
    else
        /bin/sh "$0" remove </dev/null >/dev/null 2>&1
    fi
    exit 0
fi

case ${SLURM_JOB_ID-} in
'' | *[!0-9]*) exit 0 ;;
esac
# As in the prolog: somebody else's directory could send what root removes anywhere.
# shellcheck disable=SC3067 # dash, bash and busybox have -O
[ ! -L "$RUN/jobs" ] && [ -O "$RUN/jobs" ] || exit 0
rm -f "$RUN/jobs/$SLURM_JOB_ID.json"
# Drafts (.<jobid>.<pid>) that nobody writes any more: a prolog has 5 s. By age and not by this job's
# number, because on a host with several slurmd another prolog of this job may be at work.
find "$RUN/jobs" -maxdepth 1 -type f -name '.[0-9]*.[0-9]*' ! -name '*[!0-9.]*' -mmin +10 -delete
exit 0
