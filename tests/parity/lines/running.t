Private namespaces of a container, running containers, and commands in a running container.

  $ enroot start --pid box sh -c 'echo $$'
  1
  $ ENROOT_UNSHARE_PID=y enroot start box sh -c 'ls /proc | grep -x "[0-9]*" | head -1'
  1
  $ enroot start --pid box sh -c 'exit 4'
  [4]
  $ enroot start --net box sh -c 'grep -c : /proc/net/dev'
  1
  $ enroot start --net box sh -c 'ls /sys/class/net'
  lo
  $ ENROOT_UNSHARE_NET=y enroot start box ls /sys/class/net
  lo
  $ enroot start --uts box sh -c 'hostname' | grep -c -x "$(hostname)"
  1
  $ enroot start --uts --root box sh -c 'hostname inside; hostname'; hostname | grep -c inside
  inside
  0
  [1]
  $ enroot start box readlink /proc/self/ns/pid > a; readlink /proc/self/ns/pid | cmp - a
  $ enroot start box readlink /proc/self/ns/user > a; readlink /proc/self/ns/user | cmp -s - a
  [1]
  $ enroot start box readlink /proc/self/ns/net > a; readlink /proc/self/ns/net | cmp - a
  $ enroot start box cat /proc/self/uid_map | awk '{ print $1, $2, $3 }' | sed "s/$(id -u)/ID/g"
  ID ID 1
  $ enroot start --root box cat /proc/self/uid_map | awk '{ print $1, $2, $3 }' | sed "s/$(id -u)/ID/g"
  0 ID 1
  ~ `/proc/self/uid_map` shows `0 0 1`
  0 0 1
  $ enroot start box cat /proc/self/setgroups
  deny
  $ enroot start --pid box sh -c 'kill -TERM 1; echo $?'
  0

  $ enroot start -e A=1 box sleep 30 & ready $!; enroot list --fancy | awk '$1 == "box" { print $1, $3, $NF }' > out; kill $!; cat out
  box sleep 30
  $ enroot start box.sqsh sleep 30 & ready $!; enroot list --fancy | awk '$3 == "sleep" { print $1, $3, $NF }' > out; kill $!; cat out
  <unknown> sleep 30
  $ enroot start -e A=1 box sleep 30 & ready $!; enroot exec $! sh -c 'echo $A; pwd; cat /etc/environment' > out; kill $!; cat out
  1
  HOME
  FROM_IMAGE=yes
  PATH=/opt/bin:/bin:/usr/bin
  $ enroot start box sleep 30 & ready $!; enroot exec -e B=2 -e UNSET $! sh -c 'echo "$B [${UNSET-not there}]"' > out; kill $!; cat out
  2 []
  $ enroot start box sleep 30 & ready $!; C=3 enroot exec --env C --env=D=4 -- $! sh -c 'echo $C$D' > out; kill $!; cat out
  34
  $ enroot start box sleep 30 & ready $!; enroot exec $! sh -c 'exit 5'; s=$?; kill $!; exit $s
  [5]
  $ enroot start box sleep 30 & ready $!; enroot exec $! nonsense 2> /dev/null; s=$?; kill $!; [ $s -ne 0 ]
  $ enroot start --root box sleep 30 & ready $!; enroot exec $! id -u > out; kill $!; cat out
  0
  $ enroot start --rw box sleep 30 & ready $!; enroot exec $! touch /opt/by-exec; kill $!; ls ../data/box/opt/by-exec; rm -f ../data/box/opt/by-exec
  ../data/box/opt/by-exec
  $ enroot start --uts --root box sleep 30 & ready $!; enroot exec $! hostname inside; enroot exec $! hostname; kill $!
  inside
  $ enroot start box sleep 30 & ready $!; enroot exec -e 1A=x $! true; s=$?; kill $!; exit $s
  [1]
  ~ a name in `-e` that no shell variable can have
  $ enroot exec 999999 true
  [1]
  $ enroot exec nonsense true
  [1]
  $ enroot start box sleep 30 & ready $!; enroot start box echo another; kill $!
  another
  $ enroot start -m $PWD:/mnt box sh -c 'trap "kill \$!; exit 8" TERM; sleep 30 & touch /mnt/ready; wait' & until [ -e ready ]; do sleep .1; done; kill $!; wait $!
  [8]
