The environment, in the order of enroot: the image, environ.d, the configuration, --env, hooks.

  $ enroot start box env | grep -v -E '^(_|OLDPWD|SHLVL|TZ|LANG|SHELL)=' | sort
  FROM_IMAGE=yes
  HOME=HOME
  LOGNAME=USER
  PATH=/opt/bin:/bin:/usr/bin
  PWD=HOME
  TERM=xterm
  USER=USER
  $ enroot start -e A=1 box sh -c 'echo $A'
  1
  $ enroot start --env A=1 box sh -c 'echo $A'
  1
  $ enroot start --env=A=1 box sh -c 'echo $A'
  1
  $ enroot start -e 'A=a b  c' box sh -c 'echo "$A"'
  a b  c
  $ enroot start -e A= box sh -c 'echo "[${A-unset}]"'
  []
  $ enroot start -e A=1 -e A=2 box sh -c 'echo $A'
  2
  $ enroot start -e A=1 -e B=2 box sh -c 'echo $A$B'
  12
  $ A=caller enroot start -e A box sh -c 'echo $A'
  caller
  $ A='two  words' enroot start -e A box sh -c 'echo "$A"'
  two  words
  $ enroot start -e UNSET box sh -c 'echo "[${UNSET-not there}]"'
  []
  $ enroot start -e UNSET -e UNSET=now box sh -c 'echo "[$UNSET]"'
  [now]
  $ A=caller enroot start box sh -c 'echo "[${A-unset}]"'
  [unset]
  $ enroot start -e FROM_IMAGE=changed box sh -c 'echo $FROM_IMAGE'
  changed
  $ enroot start -e PATH=/bin box sh -c 'echo $PATH'
  /bin
  $ enroot start -e HOME=/opt box sh -c 'echo $HOME'
  /opt
  $ enroot start -e 1A=x box true
  [1]
  ~ a name in `-e` that no shell variable can have
  $ enroot start -e A-B=x box true
  [1]
  ~ a name in `-e` that no shell variable can have
  $ enroot start -e =x box true
  [1]
  $ enroot start -e 'A B=x' box true
  [1]
  ~ a name in `-e` that no shell variable can have
  $ enroot start -e 'A=b=c=d' box sh -c 'echo $A'
  b=c=d
  $ enroot start -e 'A="quoted"' box sh -c 'echo "$A"'
  quoted
  ~ quotes around the value of `--env`
  "quoted"
  $ enroot start -e "A='quoted'" box sh -c 'echo "$A"'
  quoted
  ~ quotes around the value of `--env`
  'quoted'
  $ enroot start -e 'A=${HOME}' box sh -c 'echo "$A"'
  ${HOME}
  $ enroot start -e 'A=$(id)' box sh -c 'echo "$A"'
  $(id)
  $ enroot start -e 'A=b\nc' box sh -c 'printf "%s\n" "$A"'
  b\nc
  $ enroot start -e 'A=*' box sh -c 'echo "$A"'
  *
  $ enroot start -e 'A=ä€' box sh -c 'echo "$A"'
  ä€
  $ enroot start -e 'A=#x' box sh -c 'echo "$A"'
  #x
  $ enroot start -e ENROOT_X=y box sh -c 'echo "[${ENROOT_X-unset}]"'
  [unset]
  ~ variables named `ENROOT_*`
  [y]
  $ enroot start box sh -c 'echo "[${ENROOT_ROOTFS-unset}] [${ENROOT_DATA_PATH-unset}]"'
  [unset] [unset]
  $ enroot start -e LANG=C.UTF-8 box sh -c 'echo $LANG'
  C.UTF-8
  $ TERM=vt100 enroot start box sh -c 'echo $TERM'
  vt100
  $ env -u TERM enroot start box sh -c 'echo $TERM'
  ~ `TERM` is empty if the caller has none
  dumb


  $ enroot start box sh -c 'echo $USER $HOME $SHELL'
  USER HOME /bin/sh
  $ enroot start --root box sh -c 'echo $USER $HOME'
  root /root
  $ enroot start box env | grep -c ^LOGNAME=
  1
  $ enroot start box env | grep ^PWD=
  PWD=HOME
  $ enroot start box env | grep -c ^SHLVL=
  1
  $ enroot start box env | grep -c ^OLDPWD=
  0
  [1]
  $ enroot start app.sqsh | wc -l
  1
  $ enroot start --rc <(echo 'cd /opt/work; env') box | grep ^PWD=
  PWD=/opt/work

The image's /etc/environment.

  $ printf 'A=1\n  B=2\nC = 3\n# comment\n\nD="four"\nE='"'five'"'\n6=x\nexport F=7\nG=a # b\nH="open\nI=\n' > ../data/box/etc/environment
  $ enroot start box sh -c 'for v in A B C D E F G H I; do eval "echo \"$v=[\${$v-unset}]\""; done'
  A=[1]
  B=[2]
  C=[unset]
  D=[four]
  E=[five]
  F=[unset]
  G=[a # b]
  H=["open]
  I=[]
  $ printf 'A=${TERM}\nB=${NOT_SET}.\nC=$TERM\nD=${TERM}${TERM}\nE=${A}\n' > ../data/box/etc/environment
  $ enroot start box sh -c 'for v in A B C D E; do eval "echo \"$v=[\${$v-unset}]\""; done'
  A=[xterm]
  B=[.]
  C=[$TERM]
  D=[xtermxterm]
  E=[]
  $ printf 'A=1\nA=2\n' > ../data/box/etc/environment; enroot start box sh -c 'echo $A'
  2
  $ printf 'A=$(id -u)\nB=`id`\nC=$((1+1))\n' > ../data/box/etc/environment; enroot start box env | grep '^[ABC]=' | sort
  A=$(id -u)
  B=`id`
  C=$((1+1))
  $ printf 'ENROOT_A=1\nB=1' > ../data/box/etc/environment; enroot start box env | grep -E '^(ENROOT_A|B)='
  B=1
  $ printf 'A=a  b\t c \n' > ../data/box/etc/environment; enroot start box sh -c 'echo "[$A]"'
  [a  b	 c ]
  $ rm ../data/box/etc/environment; enroot start box sh -c 'echo $HOME'
  HOME

environ.d of the system and of the user.

  $ echo 'SITE=1' > ../etc/environ.d/50-site.env; enroot start box sh -c 'echo $SITE'
  1
  $ echo 'SITE=${TERM} $TERM $(id -u) `id`' > ../etc/environ.d/50-site.env; enroot start box sh -c 'echo "$SITE"'
  xterm $TERM $(id -u) `id`
  $ echo 'SITE="in quotes"' > ../etc/environ.d/50-site.env; enroot start box sh -c 'echo "$SITE"'
  in quotes
  $ echo 'SITE=2' > ../etc/environ.d/60-later.env; enroot start box sh -c 'echo $SITE'
  2
  $ mkdir -p ../.config/enroot/environ.d; echo 'SITE=user' > ../.config/enroot/environ.d/10-mine.env; enroot start box sh -c 'echo $SITE'
  user
  $ enroot start -e SITE=option box sh -c 'echo $SITE'
  option
  $ echo 'SITE=no suffix' > ../etc/environ.d/70-other; enroot start box sh -c 'echo $SITE'
  user
  $ rm -r ../.config ../etc/environ.d/60-later.env; printf '# comment\n\nnonsense\n' > ../etc/environ.d/50-site.env; enroot start box echo started
  started
  $ rm ../etc/environ.d/50-site.env; ENROOT_CONFIG_PATH=$HOME/conf enroot start box echo started
  started
  $ mkdir -p ../conf/environ.d; echo 'A=there' > ../conf/environ.d/x.env; ENROOT_CONFIG_PATH=$HOME/conf enroot start box sh -c 'echo $A'
  there

Commands in a login shell.

  $ ENROOT_LOGIN_SHELL=no enroot start box sh -c 'echo $0'
  sh
  $ ENROOT_LOGIN_SHELL=y enroot start box pwd
  HOME
  $ mkdir -p ../data/box/etc; echo 'export FROM_PROFILE=1' > ../data/box/etc/profile; ENROOT_LOGIN_SHELL=y enroot start box sh -c 'echo "[$FROM_PROFILE]"'
  [1]
  $ ENROOT_LOGIN_SHELL=n enroot start box sh -c 'echo "[$FROM_PROFILE]"'
  []
