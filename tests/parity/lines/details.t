Values in enroot.conf that use other variables.

  $ printf 'ENROOT_CACHE_PATH ${HOME}/c\nENROOT_DATA_PATH ${ENROOT_CACHE_PATH}/data\n' > ../etc/enroot.conf; env -u ENROOT_CACHE_PATH -u ENROOT_DATA_PATH enroot create -n there box.sqsh; ls ../c/data
  there
  $ ENROOT_CACHE_PATH=$HOME/cc env -u ENROOT_DATA_PATH enroot create -n other box.sqsh; ls ../cc/data
  other
  $ printf 'ENROOT_DATA_PATH ${NOT_SET}/data\n' > ../etc/enroot.conf; env -u ENROOT_DATA_PATH enroot list
  ~ a variable in `enroot.conf` that is not set
  [1]
  $ printf 'ENROOT_DATA_PATH ${NOT_SET:-${HOME}}/data\n' > ../etc/enroot.conf; env -u ENROOT_DATA_PATH enroot list
  app
  box
  $ printf 'ENROOT_DATA_PATH ${NOT_SET-$HOME}/data\n' > ../etc/enroot.conf; env -u ENROOT_DATA_PATH enroot list
  app
  box
  $ printf 'ENROOT_DATA_PATH "${HOME}/data"\n' > ../etc/enroot.conf; env -u ENROOT_DATA_PATH enroot list
  app
  box
  $ printf 'ENROOT_DATA_PATH  =  ${HOME}/data\n' > ../etc/enroot.conf; env -u ENROOT_DATA_PATH enroot list
  app
  box
  $ printf '  ENROOT_REMAP_ROOT yes  \n' > ../etc/enroot.conf; enroot start box id -u
  0
  $ printf 'ENROOT_REMAP_ROOT\tyes\r\n' > ../etc/enroot.conf; enroot start box id -u
  0
  $ printf 'ENROOT_REMAP_ROOT yes' > ../etc/enroot.conf; enroot start box id -u
  27001
  ~ the last line of `enroot.conf`
  0
  $ printf 'enroot_remap_root yes\n' > ../etc/enroot.conf; enroot start box id -u
  27001
  ~ a misspelled key of `enroot.conf` is silently ignored
  [1]
  $ printf 'ENROOT_MINE ${ENROOT_REMAP_ROOT}x\n' > ../etc/enroot.conf; echo 'hooks() { echo "$ENROOT_MINE" >&2; }' > c; ENROOT_REMAP_ROOT=y enroot start -c c box true 2>&1
  yx
  $ mkdir -p ../.config/enroot; rm ../etc/enroot.conf; echo 'ENROOT_REMAP_ROOT yes' > ../.config/enroot/enroot.conf; enroot start box id -u; rm ../.config/enroot/enroot.conf
  27001
  ~ there is one `enroot.conf`
  0

Files and links in the working directory.

  $ ln -s box.sqsh link.sqsh; enroot create link.sqsh; enroot list | grep link; enroot remove -f link
  [1]
  $ enroot start link.sqsh echo x
  x
  $ ln -s nowhere.sqsh dangling.sqsh; enroot create dangling.sqsh
  [1]
  $ enroot create -n d dangling.sqsh
  [1]
  $ enroot export -o link.sqsh box
  [1]
  $ enroot export box; ls box.sqsh; enroot export -f box; ls box.sqsh
  box.sqsh
  box.sqsh
  $ cd ..; enroot export -o work/rel.sqsh box; ls work/rel.sqsh
  work/rel.sqsh
  $ enroot export -o "a b.sqsh" box; enroot create "a b.sqsh"; enroot list | grep a; enroot remove -f "a b"
  a b
  app
  $ cp box.sqsh noext; enroot create noext; enroot list | grep noext; enroot remove -f noext
  noext
  $ cp box.sqsh x.y.sqsh; enroot create x.y.sqsh; enroot list | grep x.y; enroot remove -f x.y
  x.y
  $ cp box.sqsh box.squashfs; enroot create box.squashfs; enroot list | grep squashfs; enroot remove -f box.squashfs
  box.squashfs
  $ enroot start noext echo x
  x
  $ enroot create -f -n box2 box.sqsh; enroot create -f -n box2 box.sqsh; enroot remove -f box2
  $ enroot create -n .hidden box.sqsh; enroot list; enroot start .hidden echo x; enroot remove -f .hidden
  app
  box
  x
  ~ a name that begins with a dot
  app
  box
  [1]
  $ enroot create -n .. box.sqsh
  [1]
  $ enroot create -n -x box.sqsh; enroot list | grep x
  -x
  box
  $ enroot create /dev/null
  [1]
  $ enroot create .
  [1]
  $ touch empty.sqsh; enroot create empty.sqsh
  [1]
  $ head -c 100 box.sqsh > cut.sqsh; enroot create cut.sqsh
  [1]
  $ enroot create -n x -- box.sqsh; enroot remove -f -- x

Removal and lists.

  $ enroot create -n r1 box.sqsh; yes | enroot remove r1; enroot list; enroot remove -f r1
  -x
  app
  box
  [1]
  $ enroot list -f -f | head -1
  NAME  PID  COMM  STATE  STARTED  TIME  MNTNS  USERNS  COMMAND
  $ mkdir ../data/plain; enroot list; rmdir ../data/plain
  -x
  app
  box
  plain
  $ ln -s box ../data/link; enroot list; enroot start link echo x; rm ../data/link
  -x
  app
  box
  link
  x
  $ mkdir ../data/.dot; enroot list; rmdir ../data/.dot
  -x
  app
  box
  $ enroot remove -f ../work
  [1]

Starts.

  $ enroot start box
  $ enroot start box /bin/sh -c 'echo $0'
  /bin/sh
  $ enroot start box /etc
  [126]
  $ enroot start box ''
  [126]
  $ enroot start --rw -- box echo -- x
  -- x
  $ enroot start --rw --root box id -g
  0
  $ enroot start -m box true > /dev/null
  [1]
  $ enroot start ../data/box echo x
  [1]
  $ enroot start $HOME/data/box echo x
  [1]
  $ mkdir tree; enroot start tree echo x
  [1]
  $ cd /; enroot start box pwd
  HOME
  $ enroot start box sh -c 'umask'
  0022
  $ enroot start box sh -c 'cat /proc/self/comm'
  cat
  $ enroot start --root box sh -c 'grep -E "NoNewPrivs|Seccomp:" /proc/self/status'
  NoNewPrivs:	1
  Seccomp:	2
  $ enroot start box sh -c 'test -w / && echo writable'
  writable
  $ enroot start box sh -c 'touch /tmp/x && ls /tmp'
  x
  $ enroot start box sh -c 'cat /etc/passwd | cut -d: -f1'
  root
  nobody
  USER
  $ enroot start box sh -c 'cat /etc/group | cut -d: -f1'
  root
  nogroup
  USER
  $ enroot start --root box sh -c 'cat /etc/passwd | cut -d: -f1,3'
  root:0
  nobody:65534
  USER:27001
  $ ENROOT_RUNTIME_PATH=relative enroot start box echo x
  [1]
  $ ENROOT_TEMP_PATH=/nonsense enroot start box echo x
  x
  $ ENROOT_DATA_PATH=/nonsense enroot start box echo x
  [1]
  $ ENROOT_DATA_PATH= enroot list
  $ HOME= enroot list
  -x
  app
  box

rc and configuration.

  $ printf '#!/bin/sh\necho "$0" "$#"\n' > r; enroot start --rc r box a
  /proc/self/fd/3 1
  ~ in the script of `--rc`, `$0`
  /etc/rc 1
  $ printf 'syntax (\n' > c; enroot start -c c box true
  [1]
  $ printf 'set -e; false\n' > c; enroot start -c c box echo on
  [1]
  $ printf 'return 3\n' > c; enroot start -c c box echo on
  [3]
  $ printf 'environ() { return 3; }\n' > c; enroot start -c c box echo on
  [3]
  $ printf 'rc() { return 3; }\n' > c; enroot start -c c box echo on
  [3]
  $ printf 'environ() { echo "A=$UNSET_ONE"; }\n' > c; enroot start -c c box sh -c 'echo "[$A]"'
  [1]
  $ printf 'environ() { env | grep ^HOME; }\n' > c; enroot start -c c box sh -c 'echo $HOME'
  HOME
  $ printf 'environ() { printf "A=1\\nB=2"; }\n' > c; enroot start -c c box sh -c 'echo $A$B'
  12
  $ printf 'environ() { echo "A=x  "; }\n' > c; enroot start -c c box sh -c 'echo "[$A]"'
  [x  ]
  $ printf 'mounts() { echo "/etc/hostname /mnt/h"; }\n' > c; enroot start -c c box sh -c 'test -s /mnt/h && echo there'
  there
  $ printf '#ENROOT_DATA_PATH=${HOME}/data\n' > c; env -u ENROOT_DATA_PATH enroot start -c c box echo x
  x
  $ printf '#ENROOT_DATA_PATH=${NOT_SET}/data\n' > c; env -u ENROOT_DATA_PATH enroot start -c c box echo x
  [1]

environ.d and mounts.d.

  $ printf 'A=x  \nB=y\t\n' > ../etc/environ.d/50-a.env; enroot start box sh -c 'echo "[$A][$B]"'
  [x  ][y	]
  $ printf '  A=x\n\tB=y\n' > ../etc/environ.d/50-a.env; enroot start box sh -c 'echo "[$A][$B]"'
  [x][y]
  $ printf 'A=x\r\n' > ../etc/environ.d/50-a.env; enroot start box sh -c 'echo "$A"' | wc -c
  3
  $ printf 'A="x"  \nB='"'y'"'\nC="z' > ../etc/environ.d/50-a.env; enroot start box sh -c 'echo "[$A][$B][$C]"'
  [x][y]["z]
  $ printf 'A="x'"'"'\n' > ../etc/environ.d/50-a.env; enroot start box sh -c 'echo "[$A]"'
  [x]
  $ printf 'A=a b # c\n' > ../etc/environ.d/50-a.env; enroot start box sh -c 'echo "[$A]"'
  [a b # c]
  $ printf 'A=$HOME ${HOME} ${NOPE}.\n' > ../etc/environ.d/50-a.env; enroot start box sh -c 'echo "[$A]"'
  [$HOME HOME .]
  $ printf 'A=${B}\nB=1\n' > ../etc/environ.d/50-a.env; B=caller enroot start box sh -c 'echo "[$A][$B]"'
  [caller][1]
  $ printf 'A=1\nA=2\n' > ../etc/environ.d/50-a.env; printf 'A=3\n' > ../etc/environ.d/60-b.env; enroot start box sh -c 'echo "[$A]"'
  [3]
  $ printf 'A=x\\ny\n' > ../etc/environ.d/50-a.env; enroot start box sh -c 'printf "%%s\n" "$A"'
  %s
  $ printf 'A=x\x0by\n' > ../etc/environ.d/50-a.env; enroot start box sh -c 'echo "$A"' | wc -c
  2
  $ printf 'A=1' > ../etc/environ.d/50-a.txt; rm ../etc/environ.d/*.env; enroot start box sh -c 'echo "[$A]"'
  []
  $ printf 'A=hidden\n' > ../etc/environ.d/.hidden.env; enroot start box sh -c 'echo "[$A]"'; rm ../etc/environ.d/.hidden.env
  []
  $ printf 'A=no\n' > ../etc/environ.d/50-a.env; chmod 0 ../etc/environ.d/50-a.env; enroot start box sh -c 'echo "[$A]"'; rm -f ../etc/environ.d/50-a.env
  [no]
  ~ directories and dangling links in `environ.d`
  $ mkdir -p ../.config/enroot/environ.d ../.config/enroot/mounts.d ../.config/enroot/hooks.d; echo A=user > ../.config/enroot/environ.d/a.env; enroot start box sh -c 'echo "[$A]"'
  [user]
  $ mkdir ../etc/environ.d/dir.env; enroot start box sh -c 'echo "[$A]"'; rmdir ../etc/environ.d/dir.env
  [user]
  ~ directories and dangling links in `environ.d`
  $ ln -s gone ../etc/environ.d/gone.env; enroot start box sh -c 'echo "[$A]"'; rm ../etc/environ.d/gone.env
  [user]
  ~ directories and dangling links in `environ.d`
  $ echo '${HOME}/work /mnt none x-create=dir,bind' > ../.config/enroot/mounts.d/m.fstab; enroot start box ls /mnt/box.sqsh
  /mnt/box.sqsh
  $ printf '# comment\n\n  \n%s /mnt none x-create=dir,bind\n' $HOME/work > ../.config/enroot/mounts.d/m.fstab; enroot start box ls /mnt/box.sqsh
  /mnt/box.sqsh
  $ echo 'nonsense' > ../.config/enroot/mounts.d/m.fstab; enroot start box echo x
  [1]
  $ echo '/gone /mnt none bind,nofail' > ../.config/enroot/mounts.d/m.fstab; enroot start box echo x
  x
  $ echo '/gone /mnt none bind' > ../.config/enroot/mounts.d/m.fstab; enroot start box echo x; rm ../.config/enroot/mounts.d/m.fstab
  $ printf '#!/bin/sh\necho A=hook >> $ENROOT_ENVIRON\n' > ../.config/enroot/hooks.d/h.sh; chmod +x ../.config/enroot/hooks.d/h.sh; enroot start box sh -c 'echo "[$A]"'
  [hook]
  $ chmod -x ../.config/enroot/hooks.d/h.sh; enroot start box sh -c 'echo "[$A]"'
  [user]
  $ printf '#!/bin/sh\nexit 3\n' > ../.config/enroot/hooks.d/h.sh; chmod +x ../.config/enroot/hooks.d/h.sh; enroot start box echo x; rm ../.config/enroot/hooks.d/h.sh
  $ rm -r ../.config/enroot/environ.d; enroot start box sh -c 'echo "[$A]"'
  []

Verbs with few options.

  $ enroot version x > /dev/null
  ~ words after `list`
  [1]
  $ enroot exec box true
  [1]
  $ enroot exec 1 true
  [1]
  $ enroot load -n box docker://$REGISTRY#org/app
  [1]
  $ enroot digest nonsense
  [1]

Lines of fstab, hooks and exec.

  $ enroot start -m /etc/hostname:/mnt/a/b/h box sh -c 'test -s /mnt/a/b/h && echo there'
  there
  $ enroot start -m . box true
  [1]
  $ enroot start -m "./box.sqsh:/mnt/f" box ls /mnt/f
  /mnt/f
  $ enroot start -m /etc:../x:none:bind,x-create=dir box true
  [1]
  ~ a mount fails if its target leads above the root of the image
  $ enroot start -m /etc:/mnt -m /usr:/mnt box sh -c 'test -e /mnt/passwd || echo usr'
  usr
  $ enroot start -m /etc/passwd:/etc/passwd box sh -c 'grep -c ^root /etc/passwd'
  1
  $ A='x  ' enroot start -e A box sh -c 'echo "[$A]"'
  [x  ]
  $ A="$(printf 'x\ny')" enroot start -e A box sh -c 'echo "$A"'
  x
  ~ a line break ends a value of `--env`
  x
  y
  $ enroot start box sleep 60 & ready $!; enroot exec $! sh -c 'echo in; id -u'; enroot exec $! sh -c 'exit 9'; echo $?; kill $!
  in
  27001
  9
  $ enroot start -e A=1 box sleep 60 & ready $!; enroot exec $! sh -c 'echo "[$A]"'; enroot exec -e A=2 $! sh -c 'echo "[$A]"'; enroot exec $! nonsense; echo $?; kill $!
  [1]
  [2]
  1
  ~ a command that `enroot-nsenter` cannot run
  [1]
  [2]
  127
  $ enroot start box sleep 60 & ready $!; cd /; enroot exec $! pwd; kill $!
  HOME
  $ enroot start --root box sleep 60 & ready $!; enroot exec $! id -u; enroot list -f | grep -c sleep; kill $!
  0
  1
  $ enroot exec $$ true
  [1]
  $ mkdir -p ../etc/hooks.d; printf '#!/bin/sh\necho "A=1" >> "$ENROOT_ENVIRON"; echo out\n' > ../etc/hooks.d/50-x.sh; chmod +x ../etc/hooks.d/50-x.sh; enroot start box sh -c 'echo "[$A]"'
  [1]
  $ printf '#!/bin/sh\necho "A=\"q\"" >> "$ENROOT_ENVIRON"\n' > ../etc/hooks.d/50-x.sh; enroot start box sh -c 'echo "[$A]"'
  [q]
  $ printf '#!/bin/sh\necho "/etc/hostname /mnt/h none x-create=file,bind" >> "$ENROOT_MOUNTS"\n' > ../etc/hooks.d/50-x.sh; enroot start box sh -c 'test -s /mnt/h && echo h'
  h
  $ mv ../etc/hooks.d/50-x.sh ../etc/hooks.d/.50-x.sh; enroot start box echo x; rm ../etc/hooks.d/.50-x.sh
  x
  $ printf 'echo 1 > /made; exec "$@"\n' > ../data/box/etc/rc; enroot start --rw box cat /made; enroot start box cat /made; rm -f ../data/box/made ../data/box/etc/rc
  1
  1
  $ printf 'A=image\n' > ../data/box/etc/environment; enroot start box sh -c 'echo "[$A]"'; enroot start -e A=mine box sh -c 'echo "[$A]"'
  [image]
  [mine]
  $ printf 'A="x"  \nB=y  \n' > ../data/box/etc/environment; enroot start box sh -c 'echo "[$A][$B]"'
  [x][y  ]
  $ printf '/etc/hostname /mnt/h none x-create=file,bind\n' > ../data/box/etc/fstab; enroot start box sh -c 'test -s /mnt/h && echo h'; rm ../data/box/etc/fstab
  h
  ~ the `/etc/fstab` of an image
