The small programs that hooks use.

  $ enroot-mount | grep -o '^Usage: [a-z-]* \[--root DIR\]'
  Usage: enroot-mount [--root DIR]
  $ enroot-mount > /dev/null
  $ enroot-switchroot | grep -o '^Usage: '
  Usage:
  $ enroot-switchroot > /dev/null
  $ enroot-nsenter | grep -o '^Usage: '
  Usage:
  $ enroot-nsenter > /dev/null
  $ enroot-aufs2ovlfs | grep -o '^Usage: [a-z0-9-]* DIR'
  Usage: enroot-aufs2ovlfs DIR
  $ enroot-aufs2ovlfs > /dev/null
  $ enroot-mksquashovlfs | grep -o '^Usage: '
  Usage:
  $ enroot-mksquashovlfs x > /dev/null
  $ enroot-nsenter --user --mount id -u
  27001
  $ enroot-nsenter --user --mount --remap-root id -u
  0
  $ enroot-nsenter --user --remap-root sh -c 'exit 5'
  [5]
  $ enroot-nsenter --user --remap-root nonsense
  [1]
  ~ a command that `enroot-nsenter` cannot run
  [127]
  $ mkdir m; enroot-nsenter --user --remap-root --mount sh -c 'echo "tmpfs $PWD/m tmpfs" | enroot-mount - && touch m/x && ls m'; ls m
  x
  $ mkdir src; touch src/file; enroot-nsenter --user --remap-root --mount sh -c 'echo "$PWD/src $PWD/m none bind" > fstab && enroot-mount fstab && ls m'
  file
  $ enroot-nsenter --user --remap-root --mount sh -c 'echo "$PWD/src /m none bind" | enroot-mount --root "$PWD" - && ls m'
  file
  $ enroot-nsenter --user --remap-root --mount sh -c 'echo "$PWD/src /new none x-create=dir,bind" | enroot-mount --root "$PWD" - && ls new'; rmdir new
  file
  $ enroot-nsenter --user --remap-root --mount sh -c 'printf "%s /m none bind 0 -1\ntmpfs /m tmpfs nofail 0 0\n" "$PWD/src" | enroot-mount --root "$PWD" --pass -1 - && ls m'
  file
  $ enroot-nsenter --user --remap-root --mount sh -c 'echo "/nonsense /m none bind" | enroot-mount --root "$PWD" -'
  [1]
  $ enroot-nsenter --user --remap-root --mount sh -c 'echo "/nonsense /m none bind,nofail" | enroot-mount --root "$PWD" -' 2> /dev/null
  $ enroot-nsenter --user --remap-root --mount sh -c 'echo "/nonsense /m none bind,nofail,silent" | enroot-mount --root "$PWD" -' 2>&1
  $ enroot-nsenter --user --remap-root --mount sh -c ': | enroot-mount -'
  $ enroot-mount nonsense.fstab
  [1]
  $ enroot-nsenter --user --remap-root --uts sh -c 'hostname inside && hostname'; hostname | grep -c inside
  inside
  0
  [1]
  $ enroot-nsenter --user --remap-root --net sh -c 'ls /proc/self/ns/net > /dev/null && cat /proc/net/dev | grep -c :'
  1
  $ enroot-nsenter --user --remap-root --pid sh -c 'echo $$'
  1
  $ enroot-nsenter --user --remap-root --pid sh -c 'exit 6'
  [6]
  $ printf 'A=1\nB=two words\n' > envfile; enroot-nsenter --envfile envfile sh -c 'echo "$A $B"'
  1 two words
  $ enroot-nsenter --envfile envfile sh -c 'ls /proc/self/fd | wc -l'
  4
  $ enroot-nsenter --envfile nonsense true
  [1]
  $ enroot-nsenter --workdir /usr pwd
  /usr
  $ enroot-nsenter --workdir /nonsense pwd
  [1]
  $ sleep 30 & enroot-nsenter --target $! echo joined; kill $!
  joined
  $ enroot-nsenter --target 1 --user --mount true
  [1]
  $ mkdir -p root; cp -r ../data/box/. root; enroot-nsenter --user --mount sh -c 'echo "$PWD/root $PWD/root none bind" | enroot-mount - && exec enroot-switchroot root pwd'
  /
  $ enroot-nsenter --user --mount sh -c 'echo "$PWD/root $PWD/root none bind" | enroot-mount - && exec enroot-switchroot --envfile envfile root sh -c "echo \$A"'
  1
  $ enroot-nsenter --user --mount sh -c 'echo "$PWD/root $PWD/root none bind" | enroot-mount - && exec enroot-switchroot --workdir /opt root pwd'
  /opt
  $ echo 'echo "rc $#"' > rc; enroot-nsenter --user --mount sh -c 'printf "%s none rbind\n" "$PWD/root $PWD/root" "/proc $PWD/root/proc" | enroot-mount - && exec enroot-switchroot --rcfile rc root a b'
  rc 2
  $ echo 'echo "rc $#"' > root/etc/rc; enroot-nsenter --user --mount sh -c 'echo "$PWD/root $PWD/root none bind" | enroot-mount - && exec enroot-switchroot root a b'
  rc 2
  $ enroot-nsenter --user --mount sh -c 'echo "$PWD/root $PWD/root none bind" | enroot-mount - && exec enroot-switchroot --norc root echo x'
  x
  $ enroot-nsenter --user --mount sh -c 'exec enroot-switchroot nonsense echo x'
  [1]
  $ mkdir -p layer/sub/deep; touch layer/.wh.gone layer/sub/.wh..wh..opq layer/kept; enroot-aufs2ovlfs layer; stat -c '%F %t %T' layer/gone; ls -A layer layer/sub
  character special file 0 0
  layer:
  gone
  kept
  sub
  layer/sub:
  deep




  $ enroot-aufs2ovlfs nonsense
  [1]
  $ mkdir -p low top; touch low/a top/b; enroot-mksquashovlfs $PWD/top:$PWD/low made.sqsh -all-root -quiet -no-progress > /dev/null; unsquashfs -l made.sqsh | sort | tail -2
  squashfs-root/a
  squashfs-root/b
