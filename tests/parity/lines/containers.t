Containers on disk: create, list, export, remove.

  $ enroot list
  app
  box
  $ enroot list nonsense > out; echo $?; head -1 out
  0
  app
  ~ words after `list`
  1
  Usage: enroot list [options]


  $ enroot list --
  app
  box
  $ enroot list -f | head -1
  NAME  PID  COMM  STATE  STARTED  TIME  MNTNS  USERNS  COMMAND
  $ enroot list --fancy | awk '{ print $1 }'
  NAME
  app
  box
  $ enroot create -n one box.sqsh
  $ enroot list
  app
  box
  one
  $ ls ../data/one/bin/sh
  ../data/one/bin/sh
  $ enroot create box.sqsh
  [1]
  $ enroot create box.sqsh 2>&1 | grep -o 'already exists'
  already exists
  $ enroot create --name=two box.sqsh
  $ enroot create --name three box.sqsh
  $ enroot create -n one box.sqsh
  [1]
  $ touch ../data/one/mark; enroot create -f -n one box.sqsh; ls ../data/one/mark
  [2]
  $ touch ../data/one/mark; ENROOT_FORCE_OVERRIDE=y enroot create -n one box.sqsh; ls ../data/one/mark
  [2]
  $ enroot create -n a/b box.sqsh
  [1]
  $ enroot create -- box.sqsh 2>&1 | grep -c 'already exists'
  1
  $ cp app.sqsh other; enroot create other; ls -d ../data/other
  ../data/other
  $ enroot create nonsense.sqsh
  [1]
  $ enroot create nonsense.sqsh 2>&1 | grep -ic 'no such'
  1
  $ echo text > text.sqsh; enroot create text.sqsh
  [1]
  $ ls ../data/text
  [2]
  $ enroot create work/../box.sqsh
  [1]
  $ mkdir sub; enroot create -n four "$PWD/sub/../box.sqsh"; enroot list | grep four
  four
  $ stat -c %a ../data/one ../data/one/bin
  755
  755
  $ enroot start one true

  $ enroot export one
  $ unsquashfs -l one.sqsh | grep -c bin/busybox
  1
  $ enroot export one
  [1]
  $ enroot export one 2>&1 | grep -c 'already exists'
  1
  $ enroot export -f one; echo $?
  0
  $ ENROOT_FORCE_OVERRIDE=yes enroot export one; echo $?
  0
  $ enroot export -o exported.sqsh one; unsquashfs -l exported.sqsh | grep -c '/etc/environment$'
  1
  $ enroot export --output=sub/exported.sqsh one; ls sub
  exported.sqsh
  $ enroot export -o nowhere/x.sqsh one
  [1]
  $ enroot export nonsense
  [1]
  $ enroot export a/b
  [1]
  $ unsquashfs -ll exported.sqsh | awk '{ print $2 }' | grep / | sort -u
  root/root
  $ enroot start --rw one touch /etc/made; enroot export -f one; unsquashfs -l one.sqsh | grep made
  squashfs-root/etc/made
  $ unsquashfs -l one.sqsh | grep -E '/(\.lock|\.enroot|\.penroot)$'
  [1]
  $ unsquashfs -s one.sqsh | grep -c '^Found a valid SQUASHFS'
  1
  $ enroot create -n again one.sqsh; enroot start again cat /etc/environment
  FROM_IMAGE=yes
  PATH=/opt/bin:/bin:/usr/bin

  $ enroot remove one
  [1]
  $ echo n | enroot remove one; enroot list | grep -x one
  one
  $ echo | enroot remove one; enroot list | grep -x one
  one
  $ echo y | enroot remove one; enroot list | grep -x one
  [1]
  $ echo Y | enroot remove two; enroot list | grep -x two
  [1]
  $ enroot remove -f three; enroot list | grep -x three
  [1]
  $ enroot remove -f nonsense
  [1]
  $ enroot remove -f a/b
  [1]
  $ enroot remove --force four again; enroot list
  app
  box
  other
  $ mkdir -m 555 ../data/readonly; enroot remove -f readonly; ls -d ../data/readonly
  [2]
  $ ENROOT_FORCE_OVERRIDE=y enroot remove other; enroot list | grep other
  [1]
  $ enroot remove -f nonsense other-nonsense 2>&1 | grep -ic 'no such'
  1
  ~ `remove` stops at the first name without a container
  2
  $ mkdir ../data/last; enroot remove -f nonsense last; ls -d ../data/last
  ../data/last
  ~ `remove` stops at the first name without a container
  [2]
  $ ENROOT_DATA_PATH=$HOME/elsewhere enroot create -n x box.sqsh; ls $HOME/elsewhere
  x
  $ ENROOT_DATA_PATH=$HOME/elsewhere enroot list
  x
  $ mkdir ../data/by-hand; enroot list | grep by-hand
  by-hand
