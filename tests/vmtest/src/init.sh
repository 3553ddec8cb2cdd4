#!/bin/busybox sh
# The init of a virtual machine: mounts file systems, loads modules, runs the plan, and shuts down.
/bin/busybox --install -s /bin
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
mount -t devtmpfs dev /dev
# Terminals.
mkdir -p /dev/pts
mount -t devpts devpts /dev/pts
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t cgroup2 none /sys/fs/cgroup
ip link set lo up
# As container runtimes do: an old kernel accounts maps as locked memory, and a proxy of sockets has one for each Service.
ulimit -l unlimited
ulimit -n 20000
while read -r module; do
    insmod "/modules/$module.ko" || echo "cannot load $module"
done </modules/order
read -r port </port
stty -F "$port" raw
/guest --guest /plan >"$port"
reboot -f
