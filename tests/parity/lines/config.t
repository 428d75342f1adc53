Configuration scripts: functions, directives, statuses.

  $ printf 'environ() { echo A=1; echo "B=$PWD"; }\n' > c; enroot start -c c box sh -c 'echo $A $B'
  1 HOME/work
  $ enroot start --conf=c box sh -c 'echo $A'
  1
  $ enroot start --conf c -e A=2 box sh -c 'echo $A'
  2
  $ printf 'environ() { echo "A=$1 $2 $#"; }\n' > c; enroot start -c c box echo x y
  [1]
  $ printf 'echo "got $# $1"\n' > c; enroot start -c c box echo x y
  got 3 echo
  x y
  $ printf 'echo "got $# $1" >&2\n' > c; enroot start -c c box true a 2>&1
  got 2 true
  $ printf 'rc() {\n echo "rc $#"\n exec "$@"\n}\n' > c; enroot start -c c box echo x y
  rc 3
  x y
  $ enroot start -c c app echo x
  rc 2
  x
  $ printf 'echo "option $#"\n' > own.sh; enroot start -c c --rc own.sh box echo x
  option 2
  $ printf 'mounts() { echo "$HOME/work /mnt none x-create=dir,bind"; }\n' > c; enroot start -c c box ls /mnt/c
  /mnt/c
  $ printf 'mounts() { echo "$HOME/work /mnt"; }\n' > c; enroot start -c c box ls /mnt/c
  /mnt/c
  $ printf 'mounts() { echo "${ENROOT_ROOTFS}/bin /mnt none x-create=dir,bind"; }\n' > c; enroot start -c c box ls /mnt/busybox
  /mnt/busybox
  $ printf 'hooks() { echo made > ${ENROOT_ROOTFS}/opt/made; }\n' > c; enroot start -c c box cat /opt/made; rm -f ../data/box/opt/made
  made
  $ printf 'hooks() { echo A=hook >> ${ENROOT_ENVIRON}; }\n' > c; enroot start -c c box sh -c 'echo $A'
  hook
  $ printf 'hooks() { echo A=hook >> ${ENROOT_ENVIRON}; }\nenviron() { echo A=environ; }\n' > c; enroot start -c c box sh -c 'echo $A'
  hook
  $ printf 'environ() { echo A=environ; }\nhooks() { grep ^A= ${ENROOT_ENVIRON} >&2; }\n' > c; enroot start -c c box true 2>&1
  A=environ
  $ printf 'hooks() { echo "tmpfs /mnt tmpfs x-create=dir" >> ${ENROOT_MOUNTS}; }\n' > c; enroot start -c c box grep -c " /mnt tmpfs" /proc/mounts
  1
  $ printf 'hooks() { echo "tmpfs /mnt tmpfs x-create=dir" | enroot-mount --root "${ENROOT_ROOTFS}" -; }\n' > c; enroot start -c c box grep -c " /mnt tmpfs" /proc/mounts
  1
  $ printf 'hooks() { echo output of a hook; }\n' > c; enroot start -c c box echo x
  x
  $ printf 'hooks() { basename "${ENROOT_ROOTFS}" >&2; }\n' > c; enroot start -c c box true 2>&1
  box
  $ enroot start -c c box.sqsh true 2>&1
  overlay
  $ printf 'hooks() { id -u >&2; }\n' > c; enroot start -c c box true 2>&1
  27001
  $ enroot start --root -c c box true 2>&1
  0
  $ printf 'hooks() { echo "${ENROOT_REMAP_ROOT-unset} ${ENROOT_ROOTFS_WRITABLE-unset}" >&2; }\n' > c; enroot start --root -c c box true 2>&1
  y unset
  $ enroot start --rw -c c box true 2>&1
  unset y
  $ printf 'hooks() { echo "${ENROOT_VERSION}" >&2; }\n' > c; enroot start -c c box true 2>&1
  4.2.1
  $ printf 'hooks() { for v in PID ROOTFS ENVIRON MOUNTS LIBRARY_PATH SYSCONF_PATH RUNTIME_PATH CONFIG_PATH DATA_PATH; do v=ENROOT_$v; [ -n "${!v}" ] || echo "no $v" >&2; done; }\n' > c; enroot start -c c box true 2>&1
  $ printf 'hooks() { echo "$CALLER ${ENROOT_DATA_PATH}" >&2; }\n' > c; CALLER=x enroot start -c c box true 2>&1
  x HOME/data
  $ printf 'hooks() { source "${ENROOT_LIBRARY_PATH}/common.sh"; common::checkcmd cat; common::log INFO "from a hook"; }\n' > c; enroot start -c c box true 2>&1
  [INFO] from a hook
  $ printf 'hooks() { grep -c "^A=" "${ENROOT_ENVIRON}" >&2; }\n' > c; enroot start -e A=1 -c c box true 2>&1
  1

Statuses.

  $ echo 'exit 7' > c; enroot start -c c box echo x
  [7]
  $ echo 'false' > c; enroot start -c c box echo x
  [1]
  $ echo 'hooks() { false; }' > c; enroot start -c c box echo x
  [1]
  $ printf 'hooks() {\n false\n echo went on >&2\n}\n' > c; enroot start -c c box echo x 2>&1 | grep -c 'went on'
  0
  [1]
  $ echo 'hooks() { exit 9; }' > c; enroot start -c c box echo x
  [9]
  $ echo 'hooks() { return 8; }' > c; enroot start -c c box echo x
  [8]
  $ echo 'environ() { exit 3; }' > c; enroot start -c c box echo x
  [3]
  $ printf 'environ() {\n false\n echo A=1\n}\n' > c; enroot start -c c box echo x
  [1]
  $ echo 'mounts() { return 4; }' > c; enroot start -c c box echo x
  [4]
  $ echo 'mounts() { echo /nonsense /mnt; }' > c; enroot start -c c box echo x
  [1]
  $ echo 'hooks() { nonsense-command; }' > c; enroot start -c c box echo x
  [127]
  $ echo 'hooks() { echo $UNSET_VARIABLE; }' > c; enroot start -c c box echo x
  [1]
  $ echo 'hooks() {' > c; enroot start -c c box echo x
  [1]
  $ enroot start -c nonsense.conf box echo x
  [1]
  $ enroot start -c . box echo x
  [1]
  $ : > c; enroot start -c c box echo x
  x
  $ printf '\xff\n' > c; echo 'environ() { echo A=1; }' >> c; enroot start -c c box sh -c 'echo $A'
  [127]

Directives.

  $ echo '#ENROOT_REMAP_ROOT=y' > c; enroot start -c c box id -u
  0
  $ echo '# ENROOT_REMAP_ROOT=y' > c; enroot start -c c box id -u
  0
  $ echo '#ENROOT_REMAP_ROOT y' > c; enroot start -c c box id -u
  0
  $ echo '#ENROOT_REMAP_ROOT=n' > c; ENROOT_REMAP_ROOT=y enroot start -c c box id -u
  27001
  $ echo '#ENROOT_REMAP_ROOT=n' > c; enroot start --root -c c box id -u
  0
  $ echo '#ENROOT_ROOTFS_WRITABLE=yes' > c; enroot start -c c box touch /etc/x; ls ../data/box/etc/x
  ../data/box/etc/x
  $ printf '#ENROOT_ROOTFS=box\n' > c; enroot batch c echo from batch
  from batch
  $ printf '#ENROOT_ROOTFS=box\nenviron() { echo A=1; }\n' > c; enroot batch -- c sh -c 'echo $A'
  1
  $ printf '#ENROOT_ROOTFS=%s/work/box.sqsh\n' "$HOME" > c; enroot batch c echo from an image
  from an image
  $ printf '#ENROOT_ROOTFS=${NAME}\n' > c; NAME=box enroot batch c echo x
  x
  $ printf '#!/usr/bin/env -S enroot batch\n#ENROOT_ROOTFS=box\n' > c; chmod +x c; ./c echo as a program
  as a program
  $ echo > c; enroot batch c true
  [1]
  $ ENROOT_ROOTFS=box enroot batch c echo from the variable
  from the variable
  $ printf '#ENROOT_ROOTFS=nonsense\n' > c; enroot batch c true
  [1]
  $ printf '#ENROOT_ROOTFS=box\nrc() { echo "own rc"; }\n' > c; enroot batch c
  own rc
  $ enroot batch nonsense.conf
  [1]

enroot.conf of the system.

  $ echo 'ENROOT_REMAP_ROOT yes' > ../etc/enroot.conf; enroot start box id -u
  0
  $ ENROOT_REMAP_ROOT=no enroot start box id -u
  27001
  $ echo 'ENROOT_REMAP_ROOT=y' > ../etc/enroot.conf; enroot start box id -u
  0
  $ echo 'ENROOT_REMAP_ROOT false' > ../etc/enroot.conf; enroot start box id -u
  27001
  $ echo 'ENROOT_REMAP_ROOT   "y"  # comment' > ../etc/enroot.conf; enroot start box id -u
  0
  $ printf '# comment\n\n#ENROOT_REMAP_ROOT yes\n' > ../etc/enroot.conf; enroot start box id -u
  27001
  $ printf 'ENROOT_REMAP_ROOT yes\nENROOT_REMAP_ROOT no\n' > ../etc/enroot.conf; enroot start box id -u
  0
  ~ the first of several lines for one key
  27001
  $ : > ../etc/enroot.conf; mkdir ../etc/enroot.conf.d; echo 'ENROOT_ROOTFS_WRITABLE yes' > ../etc/enroot.conf.d/10-x.conf; enroot start box touch /etc/y; ls ../data/box/etc/y
  ../data/box/etc/y
  $ echo 'ENROOT_ROOTFS_WRITABLE no' > ../etc/enroot.conf.d/20-y.conf; enroot start box touch /etc/z
  ~ the first of several lines for one key
  [1]
  $ rm -r ../etc/enroot.conf.d; echo 'ENROOT_DATA_PATH ${HOME}/elsewhere' > ../etc/enroot.conf; env -u ENROOT_DATA_PATH enroot create -n there box.sqsh; ls ../elsewhere
  there
  $ echo 'ENROOT_DATA_PATH /var/tmp/$(id -u)-$(hostname)' > ../etc/enroot.conf; env -u ENROOT_DATA_PATH enroot info | grep DATA_PATH | sed "s/$(hostname)/NODE/"
    ENROOT_DATA_PATH=/var/tmp/27001-NODE
  $ echo 'ENROOT_SITE_VALUE "for hooks"' > ../etc/enroot.conf; echo 'hooks() { echo "$ENROOT_SITE_VALUE" >&2; }' > c; enroot start -c c box true 2>&1
  for hooks
  $ echo 'NVIDIA_VISIBLE_DEVICES void' > ../etc/enroot.conf; echo 'hooks() { echo "$NVIDIA_VISIBLE_DEVICES" >&2; }' > c; enroot start -c c box true 2>&1
  void
  $ rm ../etc/enroot.conf; enroot start box echo x
  x
  $ ENROOT_REMAP_ROOT=N enroot start box id -u
  27001
  $ ENROOT_REMAP_ROOT=F enroot start box id -u
  27001
  $ ENROOT_REMAP_ROOT=FALSE enroot start box id -u
  27001
  $ ENROOT_REMAP_ROOT=true enroot start box id -u
  0
  $ ENROOT_REMAP_ROOT=1 enroot start box id -u
  0
  $ ENROOT_REMAP_ROOT= enroot start box id -u
  27001
