#!/bin/sh
# The driver of a bundle, in the container's namespaces: environment, mounts,
# hooks, then the switch of root. What `penroot start` does in Python.
set -eu
work=$1
shift
runfile=$work/bin/penroot-runfile
mount=$work/bin/penroot-mount
container=$ENROOT_ROOTFS
# Of the bundle, then of this run.
version='' image_run='' image_workdir='' image_entrypoint='' image_command='' secret_words='' secret_parts=''
order='' conf='' rc='' root='' rw='' pid='' net='' ipc='' uts='' home='' login='' devices='' keyring='' close='' uid=0 gid=0 account='' group='' cgroups=''
env_words=''
# shellcheck source=/dev/null
. "$work/config"
# shellcheck source=/dev/null
. "$work/options"
host=${PENROOT_HOST_ROOT-}
umask=$(umask)
umask 022

export ENROOT_PID=$$ ENROOT_VERSION="$version" ENROOT_ENVIRON="$work/mnt/environment" ENROOT_MOUNTS="$work/mnt/fstab"
export ENROOT_LIBRARY_PATH="$work/lib" ENROOT_SYSCONF_PATH="$work/etc/system" ENROOT_CONFIG_PATH="$work/etc/user"
export PATH="$work/bin${PATH:+:$PATH}"
for name in root:REMAP_ROOT rw:ROOTFS_WRITABLE pid:UNSHARE_PID net:UNSHARE_NET ipc:UNSHARE_IPC home:MOUNT_HOME \
    devices:RESTRICT_DEV; do
    # enroot's hooks ask whether a variable is set.
    unset "ENROOT_${name#*:}"
    eval "[ -z \"\$${name%%:*}\" ] || export ENROOT_${name#*:}=y"
done
# shellcheck source=/dev/null
[ -z "$conf" ] || . "$conf"

defined() {
    [ -n "$conf" ] && case $(command -V "$1" 2>/dev/null) in *function*) ;; *) return 1 ;; esac
}

# One field of fstab(5).
field() {
    field=
    rest=$1
    while [ -n "$rest" ]; do
        case $rest in
        ' '*) field="$field\\040" ;;
        '	'*) field="$field\\011" ;;
        \\*) field="$field\\134" ;;
        '$'*) field="$field\\044" ;;
        *) field="$field${rest%"${rest#?}"}" ;;
        esac
        rest=${rest#?}
    done
}

# Quotes around a value are none of it.
unquote() {
    while IFS= read -r line || [ -n "$line" ]; do
        value=${line#*=}
        case $value in
        "$line") ;;
        \"*\" | \'*\')
            value=${value#?}
            line=${line%%=*}=${value%?}
            ;;
        esac
        printf '%s\n' "$line"
    done
}

# A file that an image may have: status 3 says that there is none.
of_image() {
    "$runfile" get "$container" "$1" || [ $? = 3 ]
}

collect_environment() { # --env KEY=VALUE...
    of_image /etc/environment >"$work/mnt/image.environment"
    PATH=${PATH#"$work/bin:"} "$runfile" environment "$secret_words" "$secret_parts" <"$work/mnt/image.environment"
    for file in "$work"/etc/system/environ.d/*.env "$work"/etc/user/environ.d/*.env; do
        [ ! -f "$file" ] || "$runfile" environment <"$file"
    done
    if defined environ; then
        environ >"$work/mnt/environ"
        unquote <"$work/mnt/environ"
    fi
    while [ $# -gt 1 ]; do # for hooks to see; they arrive exactly with --env below
        case $2 in
        *'
'*) ;;
        *) printf '%s\n' "$2" ;;
        esac
        shift 2
    done
}

collect_mounts() {
    of_image /etc/fstab >"$work/mnt/image.fstab"
    {
        [ -z "$pid" ] || printf '%s\n' 'proc /proc proc x-create=dir,rw,nosuid,nodev,noexec 0 -1'
        [ -z "$net" ] || printf '%s\n' 'sysfs /sys sysfs x-create=dir,ro,nosuid,nodev,noexec 0 -1'
        [ -z "$ipc$devices" ] || restricted_devices
    } >"$work/mnt/namespaces.fstab"
    {
        ! defined mounts || mounts
        while IFS= read -r line; do
            IFS=:
            set -f
            # shellcheck disable=SC2086 # its fields
            set -- $line
            set +f
            case $#${3-} in
            3ro | 3ro,* | 3rw | 3rw,*) set -- "$1" "$2" none "rbind,x-create=auto,$3" ;;
            esac
            IFS=' 	
'
            printf '%s ' "$@"
            printf '\n'
        done <"$work/mounts"
    } >"$work/mnt/options.fstab"
}

# A variable of the caller, else of the image, in $setting.
setting() {
    eval "setting=\${$1-}"
    [ -z "$setting" ] || return 0
    while IFS= read -r line; do
        [ "${line%%=*}" != "$1" ] || setting=${line#*=}
    done <"$ENROOT_ENVIRON"
}

restricted_devices() {
    printf '%s\n' 'none /dev none x-detach,nofail,silent 0 -1' \
        'tmpfs /dev tmpfs x-create=dir,rw,nosuid,noexec,mode=755 0 -1'
    for device in zero null full urandom random tty; do
        printf '/dev/%s /dev/%s none x-create=file,bind,rw,nosuid,noexec 0 -1\n' "$device" "$device"
    done
    printf '%s\n' 'devpts /dev/pts devpts x-create=dir,rw,nosuid,noexec,newinstance,ptmxmode=0666,mode=620 0 -1'
    if [ -n "$ipc" ]; then
        printf '%s\n' 'tmpfs /dev/shm tmpfs x-create=dir,rw,nosuid,nodev,noexec,mode=1777 0 -1' \
            'mqueue /dev/mqueue mqueue x-create=dir,rw,nosuid,nodev,noexec,nofail,silent 0 -1'
    else
        printf '%s\n' '/dev/shm /dev/shm none x-create=dir,bind,rw,nosuid,nodev,noexec 0 -1' \
            '/dev/mqueue /dev/mqueue none x-create=dir,bind,rw,nosuid,nodev,noexec,nofail,silent 0 -1'
    fi
    setting MELLANOX_VISIBLE_DEVICES
    case $setting in
    '' | void | none) ;;
    *)
        field "$host/dev/infiniband"
        printf '%s /dev/infiniband none x-create=dir,bind,rw,nosuid,noexec,nofail,silent 0 -1\n' "$field"
        ;;
    esac
}

do_mounts() {
    set -- "$1" "$work/mnt/image.fstab"
    # enroot's way, for who trusts the image.
    [ "${ENROOT_IMAGE_FSTAB-}" = host ] || set -- "$1" --image "$work/mnt/image.fstab"
    for file in "$work"/etc/system/mounts.d/*.fstab "$work"/etc/user/mounts.d/*.fstab; do
        [ ! -f "$file" ] || set -- "$@" "$file"
    done
    pass=$1
    shift
    "$mount" --root "$container" --pass "$pass" "$@" "$work/mnt/namespaces.fstab" "$work/mnt/options.fstab"
}

# Keep root of the node from changing the kernel through /proc, as enroot_py/runtime/masks.py does.
cover_proc() {
    flags=ro,nosuid,nodev,noexec
    field "$container"
    {
        for path in /proc/sys /proc/sysrq-trigger /proc/irq /proc/bus /proc/fs; do
            [ -e "$container$path" ] || continue
            printf '%s %s none rbind,%s\n' "$field$path" "$path" "$flags"
        done
        for path in acpi kcore keys latency_stats sched_debug scsi timer_list; do
            if [ -d "$container/proc/$path" ]; then
                printf 'tmpfs /proc/%s tmpfs %s,mode=755,size=4k\n' "$path" "$flags"
            elif [ -e "$container/proc/$path" ]; then
                printf '/dev/null /proc/%s none bind,%s\n' "$path" "$flags"
            fi
        done
    } | "$mount" --root "$container" -
}

# Entries of the image whose name is still free; ours come first.
# _apt goes: without it apt does not try to drop privileges that nobody has.
merge() {
    names=:_apt:
    while IFS= read -r line; do
        name=${line%%:*}
        case $line in
        *:*:*) ;;
        *) continue ;;
        esac
        case $names in *":$name:"*) continue ;; esac
        if [ "$line" = "${line%:image}" ]; then
            names="$names$name:"
            printf '%s\n' "$line"
        else
            printf '%s\n' "${line%:image}"
        fi
    done
}

from_image() {
    { of_image "$1" || :; } | while IFS= read -r line || [ -n "$line" ]; do
        printf '%s:image\n' "$line"
    done
}

# apt need not become another user, who does not exist.
hook_aptfix() {
    if [ -n "$root" ] && "$runfile" exists "$container" /etc/debian_version; then
        "$runfile" mkdir "$container" /etc/apt/apt.conf.d 0755
        printf 'APT::Sandbox::User "root";\n' | "$runfile" put "$container" /etc/apt/apt.conf.d/enroot
    fi
}

hook_devices() {
    [ -n "$ipc$devices" ] || return 0
    for link in fd:/proc/self/fd ptmx:/dev/pts/ptmx stdin:/proc/self/fd/0 stdout:/proc/self/fd/1 stderr:/proc/self/fd/2; do
        "$runfile" symlink "$container" "${link#*:}" "/dev/${link%%:*}"
    done
}

# The caller's own control groups, read-only, as 10-cgroups shows them.
hook_cgroups() {
    while IFS=: read -r _ controllers path; do
        # Slurm limits the step; a task's own group inside it says nothing.
        case ${path##*/} in
        task_*) path=${path%/*} ;;
        esac
        while read -r _ _ _ _ point rest; do
            case $rest in
            *' - cgroup2 '*) known= ;;
            *' - cgroup '*) known=,${rest##* }, ;;
            *) continue ;;
            esac
            case $known in
            '') [ -z "$controllers" ] || continue ;;
            *,"$controllers",*) [ -n "$controllers" ] || continue ;;
            *) continue ;;
            esac
            if [ "${path%/}" ] && [ -d "$point$path" ]; then
                field "$point$path"
                printf '%s %s none rbind,ro,nosuid,nodev,noexec,nofail,silent\n' "$field" "$point"
            fi
            break
        done </proc/self/mountinfo
    done <<EOF >"$work/mnt/cgroups.fstab"
${cgroups%?}
EOF
    [ ! -s "$work/mnt/cgroups.fstab" ] || "$mount" --root "$container" "$work/mnt/cgroups.fstab"
}

# GPUs, by the program of NVIDIA that the host has: what 98-nvidia does itself is in Python.
hook_nvidia() {
    setting NVIDIA_VISIBLE_DEVICES
    visible=$setting
    case $visible in
    '' | void | none) return 0 ;;
    esac
    [ -e "$host/proc/driver/nvidia" ] || [ -e "$host/dev/nvidiactl" ] || return 0
    if ! command -v nvidia-container-cli >/dev/null; then
        printf '%s\n' '[WARN] no GPUs in this container: nvidia-container-cli is not installed on this host' >&2
        return 0
    fi
    setting NVIDIA_DRIVER_CAPABILITIES
    case ${setting:-compute,utility} in
    all) setting=compat32,compute,display,graphics,ngx,utility,video ;;
    *) setting=${setting:-compute,utility} ;;
    esac
    ldconfig=/sbin/ldconfig
    [ ! -e /sbin/ldconfig.real ] || ldconfig=/sbin/ldconfig.real
    set -- configure --no-cgroups "--ldconfig=@$ldconfig" "--device=$visible"
    while [ -n "$setting" ]; do
        set -- "$@" "--${setting%%,*}"
        case $setting in
        *,*) setting=${setting#*,} ;;
        *) setting= ;;
        esac
    done
    [ -z "${NVIDIA_DEBUG_LOG+set}" ] || set -- --debug=/dev/stderr "$@"
    nvidia-container-cli --user "$@" "$container"
}

# Who is in a database and not in its shadow file is added to that, with no password.
complete_shadow() { # DATABASE SHADOW FIELDS
    "$runfile" exists "$container" "$2" || return 0
    {
        "$runfile" get "$container" "$2"
        printf '\n.\n'
        "$runfile" get "$container" "$1"
    } | {
        names=: fields=
        while IFS= read -r line || [ -n "$line" ]; do
            name=${line%%:*}
            case $line in
            '') continue ;;
            .) fields=$3 && continue ;;
            esac
            if [ -z "$fields" ]; then
                printf '%s\n' "$line"
                names=$names$name:
                continue
            fi
            case $names in
            *":$name:"*) ;;
            *) printf '%s%s\n' "$name" "$fields" ;;
            esac
        done
    } >"$work/mnt/shadow"
    (umask 077 && "$runfile" put "$container" "$2" <"$work/mnt/shadow")
}

hook_shadow() {
    "$runfile" exists "$container" "$shell" || shell=/bin/sh
    {
        printf '%s\n' "root:x:0:0:root:/root:$shell" "nobody:x:65534:65534:nobody:/:/sbin/nologin"
        [ "$uid" = 0 ] || printf '%s\n' "$user:x:$uid:$gid:$gecos:$directory:$shell"
        from_image /etc/passwd
    } | merge | "$runfile" put "$container" /etc/passwd
    {
        printf '%s\n' "root:x:0:" "nogroup:x:65534:"
        [ "$gid" = 0 ] || printf '%s\n' "${group%%:*}:x:$gid:"
        from_image /etc/group
    } | merge | "$runfile" put "$container" /etc/group
    complete_shadow /etc/passwd /etc/shadow ':*:::::::'
    complete_shadow /etc/group /etc/gshadow ':*::'
    if ! "$runfile" exists "$container" "$directory"; then
        "$runfile" mkdir "$container" "$directory" 0700
        for file in .bashrc .profile .bash_logout .bash_profile; do
            ! "$runfile" exists "$container" "/etc/skel/$file" ||
                of_image "/etc/skel/$file" | "$runfile" put "$container" "$directory/$file"
        done
    fi
}

hook_home() {
    [ -n "$home" ] || return 0
    source=${HOME:-$directory}
    home=$source
    [ -z "$root" ] || home=/root
    field "$source"
    source=$field
    field "$home"
    printf '%s %s none x-create=dir,rbind,rw,nosuid\n' "$source" "$field" | "$mount" --root "$container" -
}

hook_localtime() {
    # shellcheck disable=SC2094 # the host's, and the container's
    [ ! -h /etc/localtime ] || [ ! -e /etc/localtime ] || "$runfile" put "$container" /etc/localtime </etc/localtime
}

# In the order that held when the bundle was made; what is not here needs Python.
run_hooks() {
    : >"$ENROOT_MOUNTS"
    for hook; do
        case $hook in
        10-aptfix) hook_aptfix ;;
        10-cgroups) hook_cgroups ;;
        10-devices) hook_devices ;;
        10-home) hook_home ;;
        10-localtime) hook_localtime ;;
        10-shadow) hook_shadow ;;
        98-nvidia) hook_nvidia ;;
        */*) "$work/etc/$hook" >/dev/null ;;
        esac
    done
    ! defined hooks || hooks >/dev/null
    [ ! -s "$ENROOT_MOUNTS" ] || "$mount" --root "$container" "$ENROOT_MOUNTS"
}

# In a writable container programs write to copies of the host's files.
copy_host_files() {
    for file in hosts hostname resolv.conf; do
        [ -f "/etc/$file" ] || continue
        "$runfile" get / "/etc/$file" >"$work/mnt/host.$file"
        field "$work/mnt/host.$file"
        printf '%s /etc/%s none x-create=file,bind,nosuid,nodev,noexec,private\n' "$field" "$file"
    done | "$mount" --root "$container" -
}

eval "collect_environment $env_words" >"$ENROOT_ENVIRON"
collect_mounts
do_mounts -1
[ -z "$rw" ] || copy_host_files
[ "$uid" != 0 ] || cover_proc
IFS=: read -r user _ _ _ gecos directory shell <<EOF
$account
EOF
eval "run_hooks $order"
do_mounts 0
script=
if [ -n "$rc" ]; then
    script=$rc
elif defined rc; then
    script=$work/mnt/rc
    {
        "$runfile" get / "$conf"
        # shellcheck disable=SC2016 # for the container's shell
        printf '\nrc "$@"\n'
    } >"$script"
fi
if [ -z "$script$login" ] && [ -z "$image_run" ]; then
    of_image /etc/rc >/dev/null # a shell would wait for a pipe
elif [ -z "$script$login" ] && ! "$runfile" exists "$container" "$image_workdir"; then
    named=
    while read -r source target _; do # of the host's where the user has mounted that above it
        case $image_workdir in
        "${target:-$source}"/*) named=--named ;;
        esac
    done <"$work/mnt/options.fstab"
    "$runfile" mkdir "$container" "$image_workdir" 0755 $named
fi
[ -n "$rw" ] || printf 'none / none remount,bind,nosuid,nodev,ro\n' | "$mount" --root "$container" -
umask "$umask"

# What a login would set and the image did not; what was given with --env is last and wins.
set -- "$container" "$@"
[ -z "$script" ] || set -- --rcfile "$script" "$@"
if [ -z "$script$login" ] && [ -n "$image_run" ]; then
    shift
    [ $# -gt 0 ] || eval "set -- $image_command"
    eval "set -- $image_entrypoint \"\$@\""
    if [ $# -gt 0 ]; then
        set -- --exec --workdir "$image_workdir" "$container" "$@"
    else
        set -- --workdir "$image_workdir" "$container"
    fi
elif [ -z "$script$login" ] && [ $# -gt 1 ] && ! "$runfile" exists "$container" /etc/rc; then
    set -- --exec "$@"
fi
[ -z "$home" ] || set -- --env "HOME=$home" "$@"
[ -z "$keyring" ] || set -- --keyring "$@"
[ -z "$close" ] || set -- --close "$@"
[ -n "$root" ] || set -- --drop "$@"
[ -z "$root" ] || uid=0
[ "$uid" != 0 ] || set -- --lock ${net:+--net} ${uts:+--uts} "$@"
eval "exec \"\$work/bin/penroot-switchroot\" \$login --envfile \"\$ENROOT_ENVIRON\" $env_words \"\$@\""
