Hooks of the site and of the user.

  $ hook() { printf '#!/usr/bin/env bash\nset -eu\n%s\n' "$2" > "$1"; chmod +x "$1"; }; declare -f hook > hook.sh
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'echo A=site >> "${ENROOT_ENVIRON}"'; enroot start box sh -c 'echo $A'
  site
  $ enroot start -e A=option box sh -c 'echo $A'
  site
  ~ a variable that a hook or `environ()` sets overrides `--env`
  option
  $ chmod -x ../etc/hooks.d/50-site.sh; enroot start box sh -c 'echo "[$A]"'
  []
  $ mv ../etc/hooks.d/50-site.sh ../etc/hooks.d/50-site.other; chmod +x ../etc/hooks.d/50-site.other; enroot start box sh -c 'echo "[$A]"'; rm ../etc/hooks.d/50-site.other
  []
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'echo "${ENROOT_ROOTFS##*/}" >&2'; enroot start box true 2>&1
  box
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'echo noise'; enroot start box echo x
  x
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'exit 7'; enroot start box echo x
  [1]
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'touch "${ENROOT_ROOTFS}/opt/by-hook"'; enroot start box ls /opt/by-hook; rm -f ../data/box/opt/by-hook
  /opt/by-hook
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'echo "${HOME}/work /mnt none x-create=dir,bind,ro" >> "${ENROOT_MOUNTS}"'; enroot start box ls /mnt/box.sqsh
  /mnt/box.sqsh
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'echo "tmpfs /mnt tmpfs x-create=dir" | enroot-mount --root "${ENROOT_ROOTFS}" -'; enroot start box grep -c ' /mnt tmpfs' /proc/mounts
  1
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'grep ^FROM_IMAGE= "${ENROOT_ENVIRON}" >&2'; enroot start box true 2>&1
  FROM_IMAGE=yes
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'grep ^A= "${ENROOT_ENVIRON}" >&2'; enroot start -e A=1 box true 2>&1
  A=1
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'echo "$CALLER" >&2'; CALLER=seen enroot start box true 2>&1
  seen
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh '[ -e "${ENROOT_ROOTFS}/etc/hosts" ] && echo mounted >&2'; enroot start box true 2>&1
  mounted
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'source "${ENROOT_LIBRARY_PATH}/common.sh"; common::err "with these words"'; enroot start box echo x 2>&1 | grep -o 'with these words'
  with these words
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'source "${ENROOT_LIBRARY_PATH}/common.sh"; common::getpwent >&2; common::getgrent >&2'; enroot start box true 2>&1
  USER:x:27001:27001:A USER:HOME:/bin/sh
  USER:x:27001:
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'source "${ENROOT_LIBRARY_PATH}/common.sh"; cd /usr/bin; common::realpath ../bin/env >&2'; enroot start box true 2>&1
  /usr/bin/env
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'awk --version > /dev/null 2>&1 || awk 1 < /dev/null; mktemp -u > /dev/null; getent passwd 0 | cut -d: -f1 >&2'; enroot start box true 2>&1
  root
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'echo 1 >&2'; hook ../etc/hooks.d/60-later.sh 'echo 2 >&2'; hook ../etc/hooks.d/55-between.sh 'echo 1.5 >&2'; enroot start box true 2>&1
  1
  1.5
  2
  $ . ./hook.sh; rm ../etc/hooks.d/[56]*; mkdir -p ../.config/enroot/hooks.d; hook ../.config/enroot/hooks.d/10-mine.sh 'echo mine >&2'; hook ../etc/hooks.d/90-site.sh 'echo site >&2'; enroot start box true 2>&1
  site
  mine
  $ . ./hook.sh; hook ../etc/hooks.d/90-site.sh 'echo B=1 >> "${ENROOT_ENVIRON}"'; hook ../.config/enroot/hooks.d/10-mine.sh 'grep ^B= "${ENROOT_ENVIRON}" >&2'; enroot start box true 2>&1
  B=1
  $ echo 'hooks() { echo last >&2; }' > c; enroot start -c c box true 2>&1
  B=1
  last
  $ rm -r ../.config ../etc/hooks.d/90-site.sh; . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'id -u >&2'; enroot start box true 2>&1
  27001
  $ enroot start --root box true 2>&1
  0
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'chown 0:0 "${ENROOT_ROOTFS}/opt" 2> /dev/null || echo refused >&2'; enroot start --root box true 2>&1
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'mount -t tmpfs none "${ENROOT_ROOTFS}/mnt" && touch "${ENROOT_ROOTFS}/mnt/x"'; mkdir -p ../data/box/mnt; enroot start --root box ls /mnt/x
  /mnt/x
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'echo "A=with spaces" >> "${ENROOT_ENVIRON}"; echo "B=\"quoted\"" >> "${ENROOT_ENVIRON}"; echo "no variable" >> "${ENROOT_ENVIRON}"'; enroot start box sh -c 'echo "$A|$B"'
  with spaces|quoted
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'sed -i "s/^FROM_IMAGE=.*/FROM_IMAGE=edited/" "${ENROOT_ENVIRON}"'; enroot start box sh -c 'echo "$FROM_IMAGE"'
  edited
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'sed -i "/^FROM_IMAGE=/d" "${ENROOT_ENVIRON}"'; enroot start box sh -c 'echo "[${FROM_IMAGE-gone}]"'
  [gone]
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'echo "/nonsense /mnt none bind" >> "${ENROOT_MOUNTS}"'; enroot start box echo x
  [1]
  $ . ./hook.sh; hook ../etc/hooks.d/50-site.sh 'cat /proc/self/status | grep -c "^CapEff:.*[1-9a-f]" >&2'; enroot start box true 2>&1
  1
  $ rm ../etc/hooks.d/50-site.sh; enroot start box echo x
  x
