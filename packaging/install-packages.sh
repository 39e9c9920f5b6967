#!/bin/bash
# Installs Debian packages and enables and starts nothing of theirs: what was disabled or stopped before stays so.
# usage: install-packages.sh PACKAGE...      The status is apt-get's. Needs root.
set -euo pipefail
policy=/usr/sbin/policy-rc.d
saved=$policy.before-mpsagent

links() { # the links by which units are enabled, and the scripts of an init that is not systemd
    { find /etc/systemd /etc/rc?.d -type l 2>/dev/null || true; } | LC_ALL=C sort
}

restore() {
    if [ -e "$saved" ]; then mv "$saved" "$policy"; else rm -f "$policy"; fi
}

before=$(links)
[ ! -e "$policy" ] || [ -e "$saved" ] || mv "$policy" "$saved"
trap restore EXIT
trap 'exit 143' TERM HUP
trap 'exit 130' INT
# If this script is killed, the file that it leaves forbids nothing: it first looks for the script.
cat >"$policy.new" <<END
#!/bin/sh
# Written by mpsagent's packaging/install-packages.sh, for the time of an installation. You can remove it.
[ -d /proc/$$ ] && exit 101
[ ! -x $saved ] || exec $saved "\$@"
exit 0
END
chmod 755 "$policy.new"
mv "$policy.new" "$policy"

export DEBIAN_FRONTEND=noninteractive
status=0
apt-get -qq update </dev/null && apt-get -qq install -y --no-install-recommends "$@" </dev/null >/dev/null || status=$?

# Later versions of these packages leave a unit disabled if its links are gone.
LC_ALL=C comm -13 <(echo "$before") <(links) | while read -r link; do
    case $link in
    /etc/rc?.d/S*) update-rc.d "${link##*/S??}" disable >/dev/null 2>&1 || true ;;
    /etc/systemd/*) rm -f "$link" ;;
    esac
done
[ ! -d /run/systemd/system ] || systemctl daemon-reload || true
exit "$status"
