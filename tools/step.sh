#!/bin/sh
# Usage: step.sh TEXT COMMAND...
# Runs a command with its output hidden. Prints a line when it starts and one with the seconds when it ends.
# If the command fails, its output follows.
text=$1
shift
echo "  $text ..."
start=$(date +%s)
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if "$@" >"$log" 2>&1; then
  echo "  $text: $(($(date +%s) - start)) s"
else
  code=$?
  echo "  $text: failed" >&2
  cat "$log" >&2
  exit $code
fi
