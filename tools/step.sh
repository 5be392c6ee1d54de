#!/bin/sh
# Usage: step.sh TEXT COMMAND...
# Prints the text, runs the command with its output hidden, and prints the seconds. If the command fails, its output
# follows.
text=$1
shift
printf '%s ... ' "$text"
start=$(date +%s)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if "$@" >"$log" 2>&1; then
  echo "$(($(date +%s) - start)) s"
else
  code=$?
  echo "failed"
  cat "$log" >&2
  exit $code
fi
