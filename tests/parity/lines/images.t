Images from a registry, and the files that define their commands.

  $ enroot import docker://$REGISTRY#org/app:1
  $ ls *+*.sqsh
  org+app+1.sqsh
  $ enroot import docker://$REGISTRY#org/app:1
  [1]
  $ ENROOT_FORCE_OVERRIDE=y enroot import docker://$REGISTRY#org/app:1
  [1]
  ~ `import` ignores `ENROOT_FORCE_OVERRIDE`
  $ enroot import -o mine.sqsh docker://$REGISTRY#org/app:1; ls mine.sqsh
  mine.sqsh
  $ enroot import --output=mine.sqsh docker://$REGISTRY#org/app:1
  [1]
  $ enroot import -o "$HOME/absolute.sqsh" docker://$REGISTRY/org/app:1; ls ../absolute.sqsh
  ../absolute.sqsh
  $ enroot import -o nowhere/mine.sqsh docker://$REGISTRY#org/app:1
  [1]
  $ enroot import docker://$REGISTRY#org/app; ls org+app.sqsh
  [2]
  $ enroot import docker://$REGISTRY#library/bare:1; ls *bare*
  library+bare+1.sqsh
  $ enroot import -o bare.sqsh docker://$REGISTRY/library/bare; ls bare.sqsh
  bare.sqsh
  $ enroot import -o x.sqsh docker://$REGISTRY#nonsense:1
  [1]
  $ enroot import -o x.sqsh docker://$REGISTRY#org/app:nonsense; ls x.sqsh
  [2]
  $ enroot import -o x.sqsh http://$REGISTRY/org/app
  [1]
  $ enroot import -o x.sqsh org/app
  [1]
  $ enroot import -o x.sqsh docker://
  [1]
  $ enroot import -o x.sqsh 'docker://ORG/App'
  [1]
  $ enroot import -o x.sqsh docker://$REGISTRY#org/app@$IMAGE; ls x.sqsh; rm x.sqsh
  x.sqsh
  $ enroot import -o x.sqsh docker://$REGISTRY#org/app:1@$IMAGE; ls x.sqsh; rm x.sqsh
  x.sqsh
  $ enroot import -o x.sqsh docker://$REGISTRY#org/app:1@sha256:$(printf 0%.0s $(seq 64)); ls x.sqsh
  [2]
  $ enroot import -a x86_64 -o x.sqsh docker://$REGISTRY#org/app:1; ls x.sqsh; rm x.sqsh
  x.sqsh
  $ enroot import --arch x86_64 -o x.sqsh docker://$REGISTRY#org/app:1; ls x.sqsh; rm x.sqsh
  x.sqsh
  $ enroot import --arch nonsense -o x.sqsh docker://$REGISTRY#org/app:1; ls x.sqsh
  [2]
  $ [ "$(enroot digest docker://$REGISTRY#org/app:1)" = "$IMAGE" ]
  $ enroot digest docker://$REGISTRY#org/app:1 | grep -c '^sha256:[0-9a-f]*$'
  1
  $ [ "$(enroot digest docker://$REGISTRY/org/app)" = "$IMAGE" ]
  $ enroot digest docker://$REGISTRY#org/nonsense
  [1]
  $ enroot digest dockerd://org/app
  [1]

The content of an image.

  $ enroot create -n app2 mine.sqsh; grep -v '^#' ../data/app2/etc/environment
  PATH=/bin
  FROM_IMAGE=a b
  REFERRED=${TERM}
  $ cat ../data/app2/etc/fstab
  ${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev
  $ grep -v '^# enroot-provenance' ../data/app2/etc/rc
  # maintainer nobody
  mkdir -p "/srv/work" 2> /dev/null
  cd "/srv/work" && unset OLDPWD || exit 1
  if [ -s /etc/rc.local ]; then
      . /etc/rc.local
  fi
  if [ $# -gt 0 ]; then
      exec '/bin/echo' 'it'\''s' "$@"
  else
      exec '/bin/echo' 'it'\''s' 'one' 'two words'
  fi









  $ head -1 ../data/app2/etc/rc
  # enroot-provenance: docker://REGISTRY#org/app:1
  $ grep -v '^#' ../data/app2/etc/rc.local
  [1]
  $ ls -d ../data/app2/srv/work ../data/app2/data
  ../data/app2/srv/work
  [2]
  $ stat -c %a ../data/app2/etc/rc ../data/app2/etc/environment ../data/app2/etc/fstab
  644
  644
  644
  $ enroot start app2
  it's one two words
  $ enroot start app2 given 'two words'
  it's given two words
  $ enroot start mine.sqsh
  it's one two words
  $ enroot start app2 '$HOME' '*'
  it's $HOME *
  $ enroot start --rc <(echo 'echo "$FROM_IMAGE"; ls -d /data; grep -c " /data " /proc/mounts') app2
  a b
  /data
  1
  $ enroot create -n bare2 bare.sqsh; cat ../data/bare2/etc/environment
  $ echo 'echo "the image runs a shell"' | enroot start bare2
  the image runs a shell
  $ enroot start bare2 sh -c pwd
  /
  $ enroot start bare2 -- echo hello
  hello
  $ enroot start bare2 nonsense
  [127]
  $ enroot start bare2 'echo one command line'
  [127]
  $ unsquashfs -ll mine.sqsh | awk '{ print $2 }' | grep / | sort -u
  root/root
  $ enroot export -o copy.sqsh app2; enroot create -n copy copy.sqsh; enroot start copy x
  it's x

Layers of several media types.

  $ enroot import -o mixed.sqsh docker://$REGISTRY#org/mixed:1; unsquashfs -cat mixed.sqsh srv/second srv/third
  zstd
  plain
  $ unsquashfs -cat mixed.sqsh etc/rc | head -1
  # enroot-provenance: docker://REGISTRY#org/mixed:1
  $ enroot create -n mixed mixed.sqsh; enroot start mixed cat /srv/second /srv/third; enroot remove -f mixed
  zstd
  plain

Images loaded from a registry without an image file.

  $ enroot load docker://$REGISTRY#org/app:1; enroot list | grep +
  org+app+1
  $ enroot load docker://$REGISTRY#org/app:1
  [1]
  $ enroot load -f docker://$REGISTRY#org/app:1; echo $?
  0
  $ enroot load -n loaded docker://$REGISTRY#org/app:1; enroot start loaded x
  it's x
  $ enroot load --name=loaded docker://$REGISTRY#org/app:1
  [1]
  $ enroot load -n a/b docker://$REGISTRY#org/app:1
  [1]
  $ enroot load -n x docker://$REGISTRY#org/nonsense; enroot list | grep -x x
  [1]
  $ enroot load -n x dockerd://org/app
  [1]
  $ enroot remove -f loaded; enroot list | grep loaded
  [1]
