Bundles.

  $ enroot bundle box.sqsh; ls box.run
  box.run
  $ enroot bundle box.sqsh
  [1]
  $ enroot bundle -f box.sqsh; echo $?
  0
  $ ENROOT_FORCE_OVERRIDE=y enroot bundle box.sqsh; echo $?
  0
  $ enroot bundle -d 'A description' -t target -o described.run app.sqsh; ls described.run
  described.run
  $ enroot bundle nonsense.sqsh
  [1]
  $ echo text > text.sqsh; enroot bundle text.sqsh
  [1]
  $ ./box.run echo hello
  hello
  $ ./box.run -- echo hello
  hello
  $ ./box.run sh -c 'exit 5'
  [5]
  $ ./box.run nonsense 2> /dev/null
  [127]
  $ ./described.run
  entry point command
  $ ./described.run x
  entry point x
  $ ./box.run -h | head -1
  Usage: box.run [options] [--] [COMMAND] [ARG...]
  $ ./box.run --help | head -1
  Usage: box.run [options] [--] [COMMAND] [ARG...]
  $ ./box.run --nonsense | head -1
  Usage: box.run [options] [--] [COMMAND] [ARG...]
  $ ./box.run --nonsense > /dev/null
  $ ./box.run -e '' true | head -1
  Usage: box.run [options] [--] [COMMAND] [ARG...]
  $ ./box.run --env= true | head -1
  Usage: box.run [options] [--] [COMMAND] [ARG...]
  $ ./box.run --rc= | head -1
  Usage: box.run [options] [--] [COMMAND] [ARG...]
  $ ./box.run -c > out; echo $?; head -1 out
  0
  Usage: box.run [options] [--] [COMMAND] [ARG...]
  $ ./described.run -h | sed -n 3p
  A description
  $ ./described.run -i | grep -E '^(Description|Target directory)'
  Description: A description
  Target directory: target
  $ ./box.run --info | cut -d: -f1
  Compression
  Description
  Runtime version
  Target directory
  Uncompressed size
  $ ./box.run --info | grep ^Description
  Description: none
  $ enroot bundle -c -o summed.run box.sqsh; ./summed.run -i | grep -c '^Checksum: '
  1
  $ ./summed.run echo verified
  verified
  $ printf x | dd of=summed.run bs=1 seek=$(($(stat -c %s summed.run) - 5000)) conv=notrunc 2> /dev/null; ./summed.run echo damaged
  [1]
  $ ./box.run -e A=1 sh -c 'echo $A'
  1
  $ ./box.run --env=A='two  words' sh -c 'echo "$A"'
  two  words
  $ A=caller ./box.run -e A sh -c 'echo $A'
  caller
  $ ./box.run -e UNSET sh -c 'echo "[${UNSET-not there}]"'
  []
  $ ./box.run -e 1A=x true
  [1]
  ~ a name in `-e` that no shell variable can have
  $ ./box.run -m $PWD:/mnt ls /mnt/box.run
  /mnt/box.run
  $ ./box.run --mount=$PWD:/mnt ls /mnt/box.run
  /mnt/box.run
  $ ./box.run -r id -u
  0
  $ ./box.run --root id -u
  0
  $ ./box.run id -u
  27001
  $ ENROOT_REMAP_ROOT=y ./box.run id -u
  0
  $ ./box.run --rw sh -c 'touch /x && ls /x'
  /x
  $ ./box.run touch /x
  [1]
  $ echo 'echo "own script $#"' > own.sh; ./box.run --rc own.sh a b
  own script 2
  $ ./box.run --rc nonsense.sh a
  [1]
  $ printf 'environ() { echo A=conf; }\n' > c; ./box.run -c c sh -c 'echo $A'
  conf
  $ printf '#ENROOT_REMAP_ROOT=y\n' > c; ./box.run --conf c id -u
  0
  $ echo 'exit 7' > c; ./box.run -c c echo x
  [7]
  $ echo 'hooks() { false; }' > c; ./box.run -c c echo x
  [1]
  $ printf 'hooks() {\n false\n echo went on >&2\n}\n' > c; ./box.run -c c echo x 2>&1 | grep -c 'went on'
  0
  [1]
  $ ./box.run -x; ls box/etc/environment
  box/etc/environment
  $ ./box.run -x
  [1]
  $ rm -rf box; ./box.run -k echo kept; ls -d box; ls box/bin/sh
  kept
  box
  box/bin/sh
  $ rm -rf box; ./described.run --quiet --extract; ls -d target
  target
  $ ./box.run -v > out; grep -c ': ' out | grep -c -v '^0$'
  1
  $ ./box.run echo -n x
  x
  $ echo input | ./box.run cat
  input
  $ ls -A $ENROOT_TEMP_PATH
