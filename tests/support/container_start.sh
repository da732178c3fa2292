#!/bin/sh -eu
# Start a container as `enroot start` (github.com/NVIDIA/enroot) does: in a user and a mount namespace of the user, by
# the files of a directory like /etc/enroot: mounts.d/*.fstab, then hooks.d/*.sh, then what these have asked for. The
# container has the host's /usr, and stops itself when it is ready.
# Arguments: the directory like /etc/enroot, and the container's (empty) root directory.

if [ "${IN_NAMESPACES-}" != yes ]; then
    IN_NAMESPACES=yes exec unshare --user --map-root-user --mount "$0" "$@"
fi
etc=$1 root=$2
mount_lines() {
    while read -r source target _; do
        mkdir -p "$root$(dirname "$target")"
        touch "$root$target"
        mount --bind "$source" "$root$target"
    done
}
mount --make-rprivate /
mount -t tmpfs none "$root"
mkdir "$root/usr" "$root/dev" "$root/proc" "$root/old"
for name in bin sbin lib lib64; do ln -s "usr/$name" "$root/$name"; done
for name in usr dev proc; do mount --rbind "/$name" "$root/$name"; done
export ENROOT_PID=$$ ENROOT_ROOTFS="$root" ENROOT_ENVIRON="$root/environment" ENROOT_MOUNTS="$root/fstab"
printf 'PATH=/usr/bin\nNVIDIA_VISIBLE_DEVICES=all\n' >"$ENROOT_ENVIRON" # as in images of CUDA
for file in "$etc"/mounts.d/*.fstab; do
    [ ! -e "$file" ] || mount_lines <"$file"
done
for hook in "$etc"/hooks.d/*.sh; do
    [ ! -e "$hook" ] || "$hook" >&2
done
touch "$ENROOT_MOUNTS"
mount_lines <"$ENROOT_MOUNTS"
cd "$root"
pivot_root . old
set --
while IFS= read -r line; do set -- "$@" "$line"; done <environment
exec /usr/sbin/chroot . /usr/bin/env -i "$@" /bin/sh -c 'umount -l /old; kill -STOP $$; exit 0'
