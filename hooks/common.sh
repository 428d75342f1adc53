# Functions that a site's bash hooks may use: source "${ENROOT_LIBRARY_PATH}/common.sh".
# shellcheck shell=bash

common::fmt() { # common::fmt COLOR TEXT: print TEXT, in colour on a terminal
    local -A code=([bold]=1 [red]=31 [green]=32 [yellow]=33 [blue]=34)
    if [ -t 2 ] && [ -n "${code[$1]-}" ]; then
        printf '\033[%sm%s\033[0m' "${code[$1]}" "$2"
    else
        printf '%s' "$2"
    fi
}

common::log() { # common::log LEVEL [TEXT|-] [NL]: print a line, or each line of stdin, on stderr
    local level=$1 text=${2-} line
    if [ "${text}" = - ]; then
        while IFS= read -r line; do printf '[%s] %s\n' "${level}" "${line}" >&2; done
    elif [ -n "${text}" ]; then
        printf '[%s] %s\n' "${level}" "${text}" >&2
    fi
    if [ "${3-}" = NL ] || [ -z "${text}" ]; then printf '\n' >&2; fi
}

common::err() { # common::err TEXT: print an error and exit with 1
    common::log ERROR "$1"
    exit 1
}

common::checkcmd() { # common::checkcmd COMMAND...: fail unless each command exists
    local name
    for name in "$@"; do
        command -v "${name}" > /dev/null || common::err "Command not found: ${name}"
    done
}

common::realpath() { # common::realpath PATH: print PATH without symlinks
    readlink -f -- "$1" || common::err "No such file or directory: $1"
}

common::getpwent() { # print the caller's line of the host's passwd(5)
    local uid
    uid=$(common::id uid)
    getent passwd "${uid}" || printf 'user%s:x:%s:%s::/:/bin/sh\n' "${uid}" "${uid}" "$(common::id gid)"
}

common::getgrent() { # print the line of the caller's group in the host's group(5)
    local gid
    gid=$(common::id gid)
    getent group "${gid}" || printf 'group%s:x:%s:\n' "${gid}" "${gid}"
}

common::id() { # common::id uid|gid: print the caller's id on the host
    local inside outside known=PENROOT_${1^^}
    read -r inside outside _ < "/proc/self/${1}_map"
    # 0: a squashfs image is mounted, so the outer user namespace of the container maps the caller to root.
    if [ "${outside}" -eq 0 ]; then outside=${!known:-${inside}}; fi
    printf '%s\n' "${outside}"
}

common::mountpoint() { # common::mountpoint PATH: print where the file system of PATH is mounted
    findmnt --noheadings --output TARGET --target "$1"
}

common::read() { # common::read [OPTION...] NAME: like read, but succeed at end of file
    # shellcheck disable=SC2162 # the options are the caller's
    read "$@" || :
}

common::runparts() { # common::runparts list|exec SUFFIX DIRECTORY: print or run the files *SUFFIX of DIRECTORY
    local file
    for file in "$3"/*"$2"; do
        [ -f "${file}" ] || continue
        case $1 in
        list) printf '%s\n' "${file}" ;;
        exec) if [ -x "${file}" ]; then "${file}"; fi ;;
        esac
    done
}

common::chdir() { # common::chdir DIRECTORY: cd, or fail with a message
    cd "$1" 2> /dev/null || common::err "Could not change directory: $1"
}

common::mktmpdir() { # common::mktmpdir PREFIX: create a private directory and print its path
    (umask 077 && mktemp -d -p "${ENROOT_TEMP_PATH:-/tmp}" "$1.XXXXXXXXXX")
}

common::rmall() { # common::rmall PATH: remove a tree, whatever its modes are
    rm --one-file-system -rf -- "$1" 2> /dev/null || { chmod -fR u+rwX -- "$1" || :; rm --one-file-system -rf -- "$1"; }
}

common::fixperms() { # common::fixperms PATH: let the owner read a tree and write to its directories
    chmod -fR u+rX -- "$1" || :
    find "$1" -type d ! -perm -u=w -exec chmod -f u+w {} + || :
}

common::readstrarray() { # common::readstrarray ARRAY TEXT: split TEXT into lines
    if [ -n "$2" ]; then readarray -t "$1" <<< "$2"; fi
}

common::envsubst() { # common::envsubst FILE: print FILE, with ${NAME} replaced by the exported variable
    local line rest
    [ -f "$1" ] || return 0
    while IFS= read -r line || [ -n "${line}" ]; do
        rest=
        # Replace from the last variable to the first, so that values are not expanded again.
        while [[ ${line} =~ ^(.*)\$\{([A-Za-z_][A-Za-z0-9_]*)\}(.*)$ ]]; do
            line=${BASH_REMATCH[1]}
            rest=$(printenv "${BASH_REMATCH[2]}" || :)${BASH_REMATCH[3]}${rest}
        done
        printf '%s\n' "${line}${rest}"
    done < "$1"
}
