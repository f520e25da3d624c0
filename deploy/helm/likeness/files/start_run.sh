# Starts, or goes on with, the run in $RUN_DIR; the arguments are the command.
set -eu
if [ -e "$RUN_DIR/config.yaml" ]; then
  set -- "$@" --resume
fi
if [ "${RENDEZVOUS:-}" = c10d ]; then
  # The first pod keeps the store where the others meet; its name may not resolve yet while it starts.
  if [ "$JOB_COMPLETION_INDEX" = 0 ]; then is_host=true; else is_host=false; fi
  shift
  set -- torchrun "--rdzv-conf=is_host=$is_host" "$@"
fi
exec "$@"
