#!/bin/sh
# Scores a sentence and takes two steps of a beam search, with curl and sed alone.
# Usage: curl.sh [URL] [TOKEN]
set -eu
url=${1:-http://localhost:8080} token=${2:-}

ask() { # CALL JSON
    set -- "$1" "$2" -H 'Content-Type: application/json'
    call=$1 json=$2
    shift 2
    [ -z "$token" ] || set -- "$@" -H "Authorization: Bearer $token"
    curl --silent --show-error --fail-with-body "$@" --data "$json" "$url/dlm.v1.LanguageModel/$call"
    echo
}

ask Score '{"sentences": ["the man went home"]}'

# Two words after the beginning of a sentence; then one word after each of the two states.
first=$(ask Extend '{"words": ["the", "a"]}')
states=$(printf '%s' "$first" | sed 's/.*"states": \(\[[^]]*\]\).*/\1/')
ask Extend "{\"states\": $states, \"words\": [\"man\"]}"
