Verbs, usage and exit statuses. A usage error prints the usage on stdout and exits with 1.

  $ enroot > usage; echo $?; head -1 usage
  1
  Usage: enroot COMMAND [ARG...]
  $ enroot help > help; echo $?; head -1 help
  0
  Usage: enroot COMMAND [ARG...]
  $ for verb in batch bundle create digest exec export import list load remove start info version; do
  > grep -q "^ *$verb\b" help || echo "$verb is missing"; done
  $ enroot -h > /dev/null
  [1]
  ~ `enroot -h`
  $ enroot --help > /dev/null
  [1]
  ~ `enroot -h`
  $ enroot nonsense > out; echo $?; head -1 out
  1
  Usage: enroot COMMAND [ARG...]
  $ enroot --nonsense > out; echo $?; head -1 out
  1
  Usage: enroot COMMAND [ARG...]
  $ enroot version
  4.2.1
  $ enroot version | wc -l
  1
  $ enroot info | head -1
  Enroot version: 4.2.1
  $ enroot info | grep -c '^Config file: '
  1
  $ enroot info | grep '^Environment variables:'
  Environment variables:
  $ enroot info | grep -o '^  ENROOT_DATA_PATH=.*'
    ENROOT_DATA_PATH=HOME/data
  $ enroot info | grep -E '^  ENROOT_(CACHE|RUNTIME|SYSCONF|TEMP)_PATH='
    ENROOT_CACHE_PATH=HOME/cache
    ENROOT_RUNTIME_PATH=HOME/run
    ENROOT_SYSCONF_PATH=HOME/etc
    ENROOT_TEMP_PATH=HOME/tmp
  $ ENROOT_MAX_CONNECTIONS=3 enroot info | grep MAX_CONNECTIONS
    ENROOT_MAX_CONNECTIONS=3
  $ enroot info | grep -E '^  ENROOT_(REMAP_ROOT|ROOTFS_WRITABLE|FORCE_OVERRIDE)='
  [1]
  $ ENROOT_REMAP_ROOT=y enroot info | grep REMAP_ROOT
    ENROOT_REMAP_ROOT=y
  $ ENROOT_REMAP_ROOT=no enroot info | grep REMAP_ROOT
  [1]
  $ enroot info -h | head -1
  Usage: enroot info
  $ enroot info extra > out; echo $?; head -1 out
  1
  Usage: enroot info
  $ enroot info --nonsense > out; echo $?; head -1 out
  1
  Usage: enroot info

  $ enroot batch -h | head -1
  Usage: enroot batch [options] [--] CONFIG [COMMAND] [ARG...]
  $ enroot bundle --help | head -1
  Usage: enroot bundle [options] [--] IMAGE
  $ enroot create -h | head -1
  Usage: enroot create [options] [--] IMAGE
  $ enroot digest --help | head -1
  Usage: enroot digest [options] [--] URI
  $ enroot exec -h | head -1 | cut -d' ' -f1-5
  Usage: enroot exec [options] [--]
  $ enroot export --help | head -1
  Usage: enroot export [options] [--] NAME
  $ enroot import -h | head -1
  Usage: enroot import [options] [--] URI
  $ enroot list --help | head -1
  Usage: enroot list [options]
  $ enroot load -h | head -1
  Usage: enroot load [options] [--] URI
  $ enroot remove --help | head -1
  Usage: enroot remove [options] [--] NAME...
  $ enroot start -h | head -1
  Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]

  $ enroot batch > out; echo $?; head -1 out
  1
  Usage: enroot batch [options] [--] CONFIG [COMMAND] [ARG...]
  $ enroot bundle > out; echo $?; head -1 out
  1
  Usage: enroot bundle [options] [--] IMAGE
  $ enroot create > out; echo $?; head -1 out
  1
  Usage: enroot create [options] [--] IMAGE
  $ enroot digest > out; echo $?; head -1 out
  1
  Usage: enroot digest [options] [--] URI
  $ enroot exec > out; echo $?; head -1 out | cut -d' ' -f1-5
  1
  Usage: enroot exec [options] [--]
  $ enroot exec 1 > out; echo $?; head -1 out | cut -d' ' -f1-5
  1
  Usage: enroot exec [options] [--]
  $ enroot export > out; echo $?; head -1 out
  1
  Usage: enroot export [options] [--] NAME
  $ enroot import > out; echo $?; head -1 out
  1
  Usage: enroot import [options] [--] URI
  $ enroot load > out; echo $?; head -1 out
  1
  Usage: enroot load [options] [--] URI
  $ enroot remove > out; echo $?; head -1 out
  1
  Usage: enroot remove [options] [--] NAME...
  $ enroot start > out; echo $?; head -1 out
  1
  Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]

  $ enroot batch --nonsense x > out; echo $?; head -1 out
  1
  Usage: enroot batch [options] [--] CONFIG [COMMAND] [ARG...]
  $ enroot bundle --nonsense x > out; echo $?; head -1 out
  1
  Usage: enroot bundle [options] [--] IMAGE
  $ enroot create --nonsense x > out; echo $?; head -1 out
  1
  Usage: enroot create [options] [--] IMAGE
  $ enroot digest --nonsense x > out; echo $?; head -1 out
  1
  Usage: enroot digest [options] [--] URI
  $ enroot exec --nonsense 1 x > out; echo $?; head -1 out | cut -d' ' -f1-5
  1
  Usage: enroot exec [options] [--]
  $ enroot export --nonsense x > out; echo $?; head -1 out
  1
  Usage: enroot export [options] [--] NAME
  $ enroot import --nonsense x > out; echo $?; head -1 out
  1
  Usage: enroot import [options] [--] URI
  $ enroot list --nonsense > out; echo $?; head -1 out
  1
  Usage: enroot list [options]
  $ enroot load --nonsense x > out; echo $?; head -1 out
  1
  Usage: enroot load [options] [--] URI
  $ enroot remove --nonsense x > out; echo $?; head -1 out
  1
  Usage: enroot remove [options] [--] NAME...
  $ enroot start --nonsense x > out; echo $?; head -1 out
  1
  Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]

  $ enroot bundle a b > out; echo $?; head -1 out
  1
  Usage: enroot bundle [options] [--] IMAGE
  $ enroot create a b > out; echo $?; head -1 out
  1
  Usage: enroot create [options] [--] IMAGE
  $ enroot export a b > out; echo $?; head -1 out
  1
  Usage: enroot export [options] [--] NAME
  $ enroot import a b > out; echo $?; head -1 out
  1
  Usage: enroot import [options] [--] URI
  $ enroot digest a b > out; echo $?; head -1 out
  1
  Usage: enroot digest [options] [--] URI

  $ enroot create -n '' box.sqsh > out; echo $?; head -1 out
  1
  Usage: enroot create [options] [--] IMAGE
  $ enroot create --name= box.sqsh > out; echo $?; head -1 out
  1
  Usage: enroot create [options] [--] IMAGE
  $ enroot export -o '' box > out; echo $?; head -1 out
  1
  Usage: enroot export [options] [--] NAME
  $ enroot export --output= box > out; echo $?; head -1 out
  1
  Usage: enroot export [options] [--] NAME
  $ enroot import -a '' docker://x > out; echo $?; head -1 out
  1
  Usage: enroot import [options] [--] URI
  $ enroot bundle -d '' box.sqsh > out; echo $?; head -1 out
  1
  Usage: enroot bundle [options] [--] IMAGE
  $ enroot bundle -t '' box.sqsh > out; echo $?; head -1 out
  1
  Usage: enroot bundle [options] [--] IMAGE
  $ enroot start -e '' box > out; echo $?; head -1 out
  1
  Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]
  $ enroot start --env= box > out; echo $?; head -1 out
  1
  Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]
  $ enroot start -m '' box > out; echo $?; head -1 out
  1
  Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]
  $ enroot start --mount= box > out; echo $?; head -1 out
  1
  Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]
  $ enroot start --rc= box > out; echo $?; head -1 out
  1
  Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]
  $ enroot start -c '' box > out; echo $?; head -1 out
  1
  Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]
  $ enroot start --conf= box > out; echo $?; head -1 out
  1
  Usage: enroot start [options] [--] NAME|IMAGE [COMMAND] [ARG...]
  $ enroot exec -e '' 1 true > out; echo $?; head -1 out | cut -d' ' -f1-5
  1
  Usage: enroot exec [options] [--]
  $ enroot start '' > out; echo $?; cat out
  1
