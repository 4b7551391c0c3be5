#!/bin/sh
# Installs Prometheus (promtool is part of it), its node exporter and curl from Debian's packages.
# The packages start and enable their daemons, which listen on all addresses: what this script has
# installed neither runs afterwards nor starts at the next boot. What was there before stays as it is.
set -eu

new=
for package in prometheus prometheus-node-exporter curl; do  # the programs have the same names
  command -v "$package" >/dev/null || new="$new $package"
done
[ -n "$new" ] || exit 0

policy=/usr/sbin/policy-rc.d  # asked by package scripts before they start anything; an admin's own stays
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  trap 'exit 130' INT TERM
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi

export DEBIAN_FRONTEND=noninteractive
# shellcheck disable=SC2086 # words: one per package
apt-get install -y -qq --no-install-recommends $new ||
  { apt-get update -qq && apt-get install -y -qq --no-install-recommends $new; }

for daemon in prometheus prometheus-node-exporter; do
  case " $new " in
  *" $daemon "*)
    update-rc.d "$daemon" disable  # systemd's unit too
    service "$daemon" stop >/dev/null 2>&1 || :  # an admin's policy may have let it start
    ;;
  esac
done
