The grammar of mounts: fstab(5), on the command line with colons, and in files.

  $ mkdir -p src/sub; echo text > src/file; enroot start -m $PWD/src:/mnt box cat /mnt/file
  text
  $ enroot start --mount $PWD/src:/mnt box cat /mnt/file
  text
  $ enroot start --mount=$PWD/src:/mnt box cat /mnt/file
  text
  $ enroot start -m $PWD/src:/new/place:none:x-create=dir,bind box cat /new/place/file
  text
  $ enroot start -m $PWD/src box cat $PWD/src/file
  text
  $ enroot start -m $PWD/src/file:/mnt box cat /mnt 2> /dev/null
  [1]
  $ enroot start -m $PWD/src/file:/opt/file:none:x-create=file,bind box cat /opt/file; rm -f ../data/box/opt/file
  text
  $ enroot start -m $PWD/src/file:/opt/file:none:x-create=auto,bind box cat /opt/file; rm -f ../data/box/opt/file
  text
  $ enroot start -m $PWD/src:/opt/auto:none:x-create=auto,bind box ls /opt/auto; rm -rf ../data/box/opt/auto
  file
  sub
  $ enroot start -m $PWD/src:/mnt:none:bind,ro box touch /mnt/x
  [1]
  $ enroot start -m $PWD/src:/mnt:none:bind,rw box touch /mnt/x; ls src/x
  src/x
  $ enroot start -m $PWD/src:/mnt box touch /mnt/y; ls src/y
  src/y
  $ enroot start -m $PWD/src:/mnt:none:rbind,ro box touch /mnt/z
  [1]
  $ enroot start -m $PWD/src:/mnt:none:bind,noexec box sh -c 'grep " /mnt " /proc/mounts | grep -c noexec'
  1
  $ enroot start -m $PWD/src:/mnt:none:bind box sh -c 'grep " /mnt " /proc/self/mountinfo | grep -o -E "nosuid|nodev" | sort | tr "\n" " "'
  $ enroot start -m tmpfs:/mnt:tmpfs box sh -c 'touch /mnt/x && grep " /mnt " /proc/mounts | cut -d" " -f1-3'
  tmpfs /mnt tmpfs
  $ enroot start -m tmpfs:/mnt box sh -c 'grep " /mnt " /proc/mounts | cut -d" " -f1-3'
  tmpfs /mnt tmpfs
  $ enroot start -m tmpfs:/mnt:tmpfs:size=1m box sh -c 'df -k /mnt | tail -1 | awk "{ print \$2 }"'
  1024
  $ enroot start -m tmpfs:/mnt:tmpfs:mode=700 box stat -c %a /mnt
  700
  $ enroot start -m /nonsense:/mnt box echo x
  [1]
  $ enroot start -m /nonsense:/mnt:none:bind,nofail box echo x 2> /dev/null
  x
  $ enroot start -m /nonsense:/mnt:none:bind,nofail,silent box echo x 2>&1
  x
  $ enroot start -m $PWD/src:/nonsense/place:none:bind box echo x
  [1]
  $ enroot start -m "$PWD/src:/mnt:none:bind:0:0" box cat /mnt/file
  text
  $ enroot start -m "$PWD/src:/mnt:none:bind:0:-1" box cat /mnt/file
  [1]
  ~ a `--mount` whose last field is -1
  text
  $ enroot start -m "$PWD/src :/mnt" box echo x
  [1]
  ~ a space in `--mount`
  x
  $ enroot start -m ':' box echo x
  x
  ~ `--mount :`
  [1]
  $ enroot start -m "$PWD/src:/mnt:none:nonsense" box echo x
  x
  ~ a misspelled option of a bind mount
  [1]
  $ enroot start -m nonsense:/mnt:nonsense box echo x
  [1]
  $ mkdir 'with space'; echo spaced > 'with space/file'; enroot start -m "$PWD/with\\040space:/mnt" box cat /mnt/file
  spaced
  $ enroot start -m "$PWD/src:/mnt/with\\040space:none:x-create=dir,bind" box ls '/mnt/with space/file'
  /mnt/with space/file
  $ enroot start -m $PWD/src:/mnt -m $PWD/src/sub:/mnt/sub box ls /mnt/sub
  $ enroot start -m $PWD/src:/mnt -m tmpfs:/mnt:tmpfs box ls /mnt
  $ enroot start -m $PWD/src:/mnt/../opt box ls /opt/file
  /opt/file
  $ enroot start -m $PWD/src:/mnt:none:bind,private box sh -c 'grep " /mnt " /proc/self/mountinfo | grep -c -E "shared:|master:"'
  0
  [1]
  $ enroot start -m $PWD/src:/mnt:none:bind,slave box cat /mnt/file
  text
  $ enroot start -m $PWD/src:/mnt:none:bind,rslave,ro box cat /mnt/file
  text
  $ enroot start -m $PWD/src:mnt:none:x-create=dir,bind box cat /mnt/file
  text
  $ (cd src; enroot start -m .:/mnt box cat /mnt/file)
  text
  $ (cd src; enroot start -m ./file:/opt/file:none:x-create=file,bind box cat /opt/file); rm -f ../data/box/opt/file
  text
  $ ln -s src link; enroot start -m $PWD/link:/mnt box cat /mnt/file
  text
  $ ln -s /etc ../data/box/opt/inside; enroot start -m $PWD/src:/opt/inside box ls /etc/file; rm ../data/box/opt/inside
  /etc/file
  $ ln -s ../../../../../../../../../../../etc ../data/box/opt/out; enroot start -m $PWD/src:/opt/out box ls /etc/file; rm ../data/box/opt/out
  ~ or if a link of the image in the target's path leads there
  /etc/file
  $ enroot start -m none:/tmp:none:x-detach box grep -c ' /tmp ' /proc/mounts
  0
  [1]
  $ enroot start -m none:/nonsense:none:x-detach box echo x
  [1]
  $ enroot start -m none:/nonsense:none:x-detach,nofail,silent box echo x 2>&1
  x
  $ enroot start -m /proc:/mnt:none:rbind box ls -d /mnt/self
  /mnt/self
  $ enroot start -m "$PWD/src:/mnt:none:bind,remount,ro" box touch /mnt/new
  [1]
  $ enroot start -m '$HOME/work/src:/mnt' box ls /mnt
  [1]
  ~ variables in `--mount`
  file
  sub
  x
  y
  $ enroot start -m '${HOME}/work/src:/mnt' box ls /mnt
  [1]
  ~ variables in `--mount`
  file
  sub
  x
  y

mounts.d of the system and of the user.

  $ echo "$PWD/src /mnt none x-create=dir,bind" > ../etc/mounts.d/50-site.fstab; enroot start box cat /mnt/file
  text
  $ echo '${HOME}/work/src /mnt none x-create=dir,bind' > ../etc/mounts.d/50-site.fstab; enroot start box cat /mnt/file
  text
  $ printf '# comment\n\n  %s\t/mnt\tnone\tx-create=dir,bind\t0\t0\n' "$PWD/src" > ../etc/mounts.d/50-site.fstab; enroot start box cat /mnt/file
  text
  $ echo "$PWD/src /mnt none x-create=dir,bind 0 -1" > ../etc/mounts.d/50-site.fstab; enroot start box cat /mnt/file
  text
  $ echo 'tmpfs /mnt tmpfs x-create=dir' > ../etc/mounts.d/60-later.fstab; enroot start box ls /mnt; rm ../etc/mounts.d/60-later.fstab
  $ echo "/nonsense /mnt none x-create=dir,bind,nofail,silent" > ../etc/mounts.d/50-site.fstab; enroot start box echo x 2>&1
  x
  $ echo "/nonsense /mnt none x-create=dir,bind" > ../etc/mounts.d/50-site.fstab; enroot start box echo x
  [1]
  $ mv ../etc/mounts.d/50-site.fstab ../etc/mounts.d/50-site.off; enroot start box echo x
  x
  $ mkdir -p ../.config/enroot/mounts.d; echo '${HOME}/work/src /mnt none x-create=dir,bind' > ../.config/enroot/mounts.d/mine.fstab; enroot start box cat /mnt/file; rm -r ../.config
  text
  $ echo "$PWD/src" > ../etc/mounts.d/50-site.fstab; enroot start box cat $PWD/src/file; rm ../etc/mounts.d/50-site.fstab
  text

The image's /etc/fstab.

  $ echo '${ENROOT_ROOTFS}/opt /mnt none x-create=dir,bind,rw,nosuid,nodev' > ../data/box/etc/fstab; touch ../data/box/opt/there; enroot start box ls /mnt; rm ../data/box/etc/fstab
  there
  work
  $ echo 'tmpfs /mnt tmpfs x-create=dir' > ../data/box/etc/fstab; enroot start box grep -c ' /mnt tmpfs' /proc/mounts; rm ../data/box/etc/fstab
  1
  $ enroot start app.sqsh true; enroot start -w app.sqsh > /dev/null; enroot start --rc <(echo 'grep -c " /data " /proc/mounts') app
  entry point true
  1

The home directory, and mounts of every container.

  $ ENROOT_MOUNT_HOME=y enroot start box ls $HOME/work/box.sqsh
  HOME/work/box.sqsh
  $ enroot start box.sqsh ls $HOME/work
  [1]
  $ ENROOT_MOUNT_HOME=y enroot start --root box ls /root/work/box.sqsh
  /root/work/box.sqsh
  $ ENROOT_MOUNT_HOME=y enroot start --root box sh -c 'echo $HOME'
  /root
  $ enroot start box sh -c 'grep -E -o " (/proc|/sys|/dev|/tmp|/dev/shm|/etc/hosts|/etc/hostname|/etc/resolv.conf) " /proc/mounts | sort -u'
   /dev
   /dev/shm
   /etc/hostname
   /etc/hosts
   /etc/resolv.conf
   /proc
   /sys
   /tmp
  $ enroot start box sh -c 'grep " /sys " /proc/mounts | cut -d" " -f4 | cut -d, -f1 | head -1'
  ro
  $ enroot start box sh -c 'echo x > /etc/hosts' 2> /dev/null
  [1]
  $ enroot start --rw box sh -c 'echo x > /etc/hosts' 2> /dev/null
  [1]
  ~ with `--rw` they are private copies
