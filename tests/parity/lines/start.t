The command of a start: its words, its directory, its exit status.

  $ enroot start box echo hello
  hello
  $ enroot start box sh -c 'exit 7'
  [7]
  $ enroot start box false
  [1]
  $ enroot start box sh -c 'kill -TERM $$'
  [-15]
  $ enroot start box sh -c 'kill -9 $$'
  [-9]
  $ enroot start box nonsense 2> /dev/null
  [127]
  $ enroot start box /etc/environment 2> /dev/null
  ~ `/bin/sh` runs a file that is not a program
  [126]
  $ enroot start box /bin/echo hello
  hello
  $ enroot start box -- echo hello
  hello
  $ enroot start -- box echo hello
  hello
  $ enroot start box echo -- -n
  -- -n
  $ enroot start box echo -e KEY
  KEY
  $ enroot start box echo 'a b' "c'd" 'e"f' '$g' '\h' '*'
  a b c'd e"f $g \h *
  $ enroot start box printf '[%s]' '' x ''
  [][x][]
  $ enroot start box printf '[%s]' 'two
  > lines'
  [two
  lines]
  $ enroot start box 'echo one command line'
  one command line
  $ enroot start box 'echo $((1 + 1))' ignored
  2
  $ enroot start box pwd
  HOME
  $ echo input | enroot start box cat
  input
  $ echo 'echo from a shell' | enroot start box
  from a shell
  $ echo 'exit 3' | enroot start box
  [3]
  $ echo 'echo $0 $#' | enroot start box sh -s a b
  sh 2
  $ enroot start box sh -c 'echo out; echo err >&2' 2> err; cat err
  out
  err
  $ enroot start nonsense
  [1]
  $ enroot start nonsense 2>&1 | grep -ic 'no such'
  1
  $ enroot start a/b
  [1]
  $ enroot start nonsense.sqsh
  [1]
  $ enroot start text.sqsh
  [1]
  $ enroot start box id -u
  27001
  $ enroot start box id -g
  27001
  $ enroot start -r box id -u
  0
  $ enroot start --root box id -g
  0
  $ ENROOT_REMAP_ROOT=yes enroot start box id -u
  0
  $ enroot start box whoami
  USER
  $ enroot start --root box whoami
  root
  $ enroot start box sh -c 'grep -c "^$(whoami):" /etc/passwd'
  1
  $ enroot start box sh -c 'grep "^root:" /etc/passwd /etc/group'
  /etc/passwd:root:x:0:0:root:/root:/bin/sh
  /etc/group:root:x:0:
  $ enroot start box touch /new 2> /dev/null
  [1]
  $ enroot start -w box touch /new; ls ../data/box/new
  ../data/box/new
  $ enroot start --rw box touch /new2; ls ../data/box/new2
  ../data/box/new2
  $ ENROOT_ROOTFS_WRITABLE=y enroot start box touch /new3; ls ../data/box/new3
  ../data/box/new3
  $ ENROOT_ROOTFS_WRITABLE=n enroot start box touch /new4 2> /dev/null
  [1]
  $ enroot start -rw box touch /new5 > out; echo $?; head -1 out
  1
  Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]









  $ enroot start --root --rw box sh -c 'touch /new6 && chown 1:1 /new6 && stat -c %u /new6'
  0
  $ enroot start --root box chown 1:1 /etc; echo $?
  0
  $ enroot start box chown 1:1 /etc; echo $?
  0
  $ enroot start --rw box sh -c 'mkdir -m 700 /private && stat -c %a /private'
  700
  $ (umask 077; enroot start box sh -c umask)
  0077
  $ enroot start box sh -c 'ulimit -f'
  unlimited
  $ enroot start box hostname | grep -cx "$(hostname)"
  1
  $ enroot start box grep -c . /etc/resolv.conf | grep -cv '^0$'
  1
  $ enroot start box sh -c 'test -w /tmp && touch /tmp/x && echo written'
  written
  $ touch /tmp/penroot-line.$$; enroot start box ls /tmp; rm -f /tmp/penroot-line.*
  $ enroot start box sh -c 'ls -d /var/run /var/lock'
  /var/lock
  /var/run
  $ enroot start box cat /proc/1/comm > out; cmp out /proc/1/comm
  $ enroot start box sh -c '> /dev/null < /dev/zero; echo $?'
  0
  $ enroot start box sh -c 'grep NoNewPrivs /proc/self/status'
  NoNewPrivs:	1
  $ enroot start box grep Seccomp: /proc/self/status
  Seccomp:	2
  $ enroot start box grep CapEff /proc/self/status
  CapEff:	0000000000000000
  $ enroot start box mount -t tmpfs none /mnt 2> /dev/null; echo $?
  1
  $ enroot start --root box mount -t tmpfs none /tmp 2> /dev/null; echo $?
  0
  $ enroot start box readlink /proc/self/exe
  /bin/busybox
  $ enroot start box ls /proc/self/fd | wc -l
  4

An image with a command script of its own.

  $ enroot start app
  entry point command
  $ enroot start app a 'b c'
  entry point a b c
  $ enroot start app -- x
  entry point -- x
  $ enroot start app -x
  entry point -x
  $ echo 'echo rc.local; set -- changed' > ../data/app/etc/rc.local; enroot start app given; : > ../data/app/etc/rc.local
  rc.local
  entry point changed
  $ echo 'echo "$# $1"; exec "$@"' > own.sh; enroot start --rc own.sh box echo x
  2 echo
  x
  $ enroot start --rc=own.sh box echo x | tail -1
  x
  $ enroot start --rc own.sh app echo x | tail -1
  x
  $ cat ../data/box/etc/rc
  [1]
  $ enroot start --rc nonsense.sh box
  [1]
  $ enroot start --rc . box
  [1]
  $ echo 'echo no command: $#' > own.sh; enroot start --rc own.sh box
  no command: 0
  $ enroot start --rc <(echo 'echo from a pipe') box
  from a pipe
  $ echo 'exit 9' > own.sh; enroot start --rc own.sh box; echo $?
  9
  $ mv ../data/app/opt/work ../data/app/opt/moved; enroot start --rw app; ls -d ../data/app/opt/work
  entry point command
  ../data/app/opt/work

Images are started without unpacking.

  $ enroot start box.sqsh echo hello
  hello
  $ enroot start ./box.sqsh echo hello
  hello
  $ enroot start "$PWD/box.sqsh" cat /etc/environment
  FROM_IMAGE=yes
  PATH=/opt/bin:/bin:/usr/bin
  $ enroot start app.sqsh
  entry point command
  $ enroot start box.sqsh touch /new 2> /dev/null
  [1]
  $ enroot start --rw box.sqsh sh -c 'touch /new && ls /new'
  /new
  $ enroot start --rw box.sqsh ls /new 2> /dev/null
  [1]
  $ enroot start --root box.sqsh id -u
  0
  $ enroot start box.sqsh id -u
  27001
  $ enroot start box.sqsh stat -c %U /bin/busybox
  USER
  $ cp box.sqsh 'with space.sqsh'; enroot start 'with space.sqsh' echo hello
  hello
  $ cp box.sqsh box; enroot start box echo hello; rm box
  hello
  $ (cd ..; enroot start work/box.sqsh pwd)
  HOME
  $ echo input | enroot start box.sqsh cat
  input
  $ enroot start box.sqsh sh -c 'exit 5'
  [5]
  $ (enroot start box.sqsh sleep 30 & ready $!; enroot start box.sqsh echo beside; kill %1; wait) 2> /dev/null
  beside
