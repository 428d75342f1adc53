# Functions that a site's bash hooks may use: source "${ENROOT_LIBRARY_PATH}/common.sh".
# shellcheck shell=bash

common::fmt() { # common::fmt COLOR TEXT: colour on a terminal
    local -A code=([bold]=1 [red]=31 [green]=32 [yellow]=33 [blue]=34)
    if [ -t 2 ] && [ -n "${code[$1]-}" ]; then
        printf '\033[%sm%s\033[0m' "${code[$1]}" "$2"
    else
        printf '%s' "$2"
    fi
}

common::log() { # common::log LEVEL [TEXT|-] [NL]: a line on stderr, or each line of stdin
    local level=$1 text=${2-} line
    if [ "${text}" = - ]; then
        while IFS= read -r line; do printf '[%s] %s\n' "${level}" "${line}" >&2; done
    elif [ -n "${text}" ]; then
        printf '[%s] %s\n' "${level}" "${text}" >&2
    fi
    if [ "${3-}" = NL ] || [ -z "${text}" ]; then printf '\n' >&2; fi
}

common::err() { # common::err TEXT: say it and fail
    common::log ERROR "$1"
    exit 1
}

common::checkcmd() { # common::checkcmd COMMAND...: fail unless each is there
    local name
    for name in "$@"; do
        command -v "${name}" > /dev/null || common::err "Command not found: ${name}"
    done
}

common::realpath() { # common::realpath PATH
    readlink -f -- "$1" || common::err "No such file or directory: $1"
}

common::getpwent() { # the caller's line of passwd(5), on the host
    local uid
    uid=$(common::id uid)
    getent passwd "${uid}" || printf 'user%s:x:%s:%s::/:/bin/sh\n' "${uid}" "${uid}" "$(common::id gid)"
}

common::getgrent() { # the caller's line of group(5), on the host
    local gid
    gid=$(common::id gid)
    getent group "${gid}" || printf 'group%s:x:%s:\n' "${gid}" "${gid}"
}

common::id() { # common::id uid|gid: the caller's number on the host
    local inside outside known=PENROOT_${1^^}
    read -r inside outside _ < "/proc/self/${1}_map"
    # Where an image is mounted, the namespace outside is one in which he is root.
    if [ "${outside}" -eq 0 ]; then outside=${!known:-${inside}}; fi
    printf '%s\n' "${outside}"
}

common::mountpoint() { # common::mountpoint PATH: where its file system is mounted
    findmnt --noheadings --output TARGET --target "$1"
}

common::read() { # common::read [OPTION...] NAME: like read, content when there is nothing
    # shellcheck disable=SC2162 # the options are the caller's
    read "$@" || :
}

common::runparts() { # common::runparts list|exec SUFFIX DIRECTORY
    local file
    for file in "$3"/*"$2"; do
        [ -f "${file}" ] || continue
        case $1 in
        list) printf '%s\n' "${file}" ;;
        exec) if [ -x "${file}" ]; then "${file}"; fi ;;
        esac
    done
}
