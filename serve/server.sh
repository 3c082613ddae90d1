#!/usr/bin/env bash
# Runs the service in the background as a process group of its own.
#
#   serve/server.sh [-d FOLDER] start [options of launch.py]   waits until it is ready
#   serve/server.sh [-d FOLDER] stop                           drains and ends it
#   serve/server.sh [-d FOLDER] status                         0 and a line when it runs, else 3
#
# FOLDER (default: deepinfer-server-UID in XDG_RUNTIME_DIR, else TMPDIR, else /tmp) is private and holds the log
# `service.log`, the port in `port`, and `pid` with the process's start time, so that another process that got the
# same number later is never taken for it. One folder is one server.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
folder=${XDG_RUNTIME_DIR:-${TMPDIR:-/tmp}}/deepinfer-server-$(id -u)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3

say() { echo "server: $*"; }
fail() { echo "server: $*" >&2; exit "${code:-1}"; }
usage() { code=2 fail "usage: serve/server.sh [-d FOLDER] start [options of launch.py] | stop | status"; }

# Start time of a process in clock ticks since boot: the 20th field after the name in parentheses.
started_at() {
    local line
    line=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    line=${line##*) }
    [ "${line%% *}" != Z ] || return 1
    set -- $line
    echo "${20}"
}

# Sets pid to the launcher that runs, or fails.
running() {
    local ticks
    read -r pid ticks 2>/dev/null <"$folder/pid" || return 1
    [ "$(started_at "$pid")" = "$ticks" ]
}

private_folder() {
    mkdir -p -m 700 "$folder"
    [ ! -L "$folder" ] && [ -O "$folder" ] || fail "$folder belongs to another user; choose a folder with -d"
    chmod 700 "$folder"
    folder=$(cd "$folder" && pwd)
}

# The launcher's own last line, else the last one of any process.
reason() {
    grep -a '^\(deepinfer\|launch.py\): ' "$folder/service.log" | tail -n 1 | grep . || tail -n 1 "$folder/service.log"
}

group_is_empty() { ! kill -0 -- "-$1" 2>/dev/null; }

start() {
    private_folder
    exec 9>"$folder/lock"
    flock -n 9 || fail "another start or stop of $folder is under way"
    ! running || fail "it runs already with pid $pid in $folder"
    rm -f "$folder/port" "$folder/pid"
    [ ! -e "$folder/service.log" ] || mv "$folder/service.log" "$folder/service.log.1"
    (umask 077 && : >"$folder/service.log")
    # setsid makes a new session and with it a process group; its number is the launcher's pid.
    setsid "$python" "$root/launch.py" --port-file "$folder/port" "$@" </dev/null >>"$folder/service.log" 2>&1 9>&- &
    pid=$!
    echo "$pid $(started_at "$pid")" >"$folder/pid" || fail "it ended at once: $(tail -n 1 "$folder/service.log")"
    trap 'kill -TERM "$pid" 2>/dev/null; fail "interrupted; the server was told to end"' INT TERM
    while [ ! -s "$folder/port" ]; do
        if ! running; then
            wait "$pid" || code=$?
            rm -f "$folder/pid"
            fail "it did not start: $(reason) (log: $folder/service.log)"
        fi
        sleep 0.1
    done
    trap - INT TERM
    say "ready on port $(cat "$folder/port"), pid $pid, log $folder/service.log"
}

stop() {
    private_folder
    exec 9>"$folder/lock"
    flock -n 9 || fail "another start or stop of $folder is under way"
    if ! running; then
        rm -f "$folder/pid" "$folder/port"
        say "not running"
        return
    fi
    kill -TERM "$pid"
    trap 'kill -TERM "$pid" 2>/dev/null || true' INT # the second signal ends the drain
    local tenths=0
    while running; do
        sleep 0.1 || true
        tenths=$((tenths + 1))
        [ $((tenths % 100)) -ne 0 ] || say "draining for $((tenths / 10)) s; Ctrl-C ends it now"
    done
    trap - INT
    # The launcher ends its children; what resists, as after a SIGKILL of the launcher, goes with the group.
    for _ in $(seq 50); do
        ! group_is_empty "$pid" || break
        sleep 0.1
    done
    group_is_empty "$pid" || kill -KILL -- "-$pid" 2>/dev/null || true
    rm -f "$folder/pid" "$folder/port"
    say "stopped"
}

status() {
    if [ -O "$folder" ] && running; then
        if [ -s "$folder/port" ]; then
            say "runs with pid $pid on port $(cat "$folder/port"), log $folder/service.log"
        else
            say "is starting with pid $pid, log $folder/service.log"
        fi
    else
        code=3 fail "not running"
    fi
}

if [ "${1:-}" = -d ]; then
    [ -n "${2:-}" ] || usage
    folder=$2
    shift 2
fi
command=${1:-}
[ $# -eq 0 ] || shift
case $command in
    start) start "$@" ;;
    stop) [ $# -eq 0 ] || usage; stop ;;
    status) [ $# -eq 0 ] || usage; status ;;
    *) usage ;;
esac
