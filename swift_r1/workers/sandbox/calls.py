"""Which system calls a program may make: seccomp filters (classic BPF), for x86-64.

What does not pass answers "not implemented", as a kernel without it does, so that libraries take their other way. Of a
lone program (`call_filter`) only what is listed passes: no process can be started (`clone` makes threads only), no
program loaded, no socket made but a pair within the process; nothing can be mounted, traced, attached, or kept in the
kernel. Of the commands of a sandbox that lives on (`command_filter`) all passes that is not listed.
"""

from __future__ import annotations

import errno
import struct

MACHINE = "x86_64"
_ARCHITECTURE = 0xC000003E  # AUDIT_ARCH_X86_64

_FILES = dict(
    read=0, write=1, readv=19, writev=20, pread64=17, pwrite64=18, preadv=295, pwritev=296, preadv2=327,
    pwritev2=328, close=3, close_range=436, lseek=8, dup=32, dup2=33, dup3=292, pipe=22, pipe2=293, fcntl=72,
    fsync=74, fdatasync=75, truncate=76, ftruncate=77, fadvise64=221, sendfile=40, copy_file_range=326,
    open=2, openat=257, creat=85, stat=4, lstat=6, fstat=5, newfstatat=262, statx=332, statfs=137, fstatfs=138,
    access=21, faccessat=269, faccessat2=439, getdents64=217, getcwd=79, chdir=80, fchdir=81, mkdir=83, mkdirat=258,
    rmdir=84, rename=82, renameat=264, renameat2=316, link=86, linkat=265, unlink=87, unlinkat=263, symlink=88,
    symlinkat=266, readlink=89, readlinkat=267, chmod=90, fchmod=91, fchmodat=268, umask=95, utimensat=280,
    futimesat=261, utime=132, utimes=235, select=23, pselect6=270, poll=7, ppoll=271, epoll_create=213,
    epoll_create1=291, epoll_ctl=233, epoll_wait=232, epoll_pwait=281, epoll_pwait2=441, eventfd2=290, signalfd4=289,
    sendto=44, recvfrom=45, sendmsg=46, recvmsg=47, shutdown=48, getsockname=51, getpeername=52, getsockopt=55,
)  # fmt: skip
_PROCESS = dict(
    mmap=9, munmap=11, mremap=25, mprotect=10, madvise=28, msync=26, brk=12, rt_sigaction=13, rt_sigprocmask=14,
    rt_sigreturn=15, rt_sigpending=127, rt_sigtimedwait=128, rt_sigsuspend=130, sigaltstack=131, pause=34, kill=62,
    tkill=200, tgkill=234, restart_syscall=219, getpid=39, getppid=110, gettid=186, getuid=102, geteuid=107,
    getgid=104, getegid=108, getresuid=118, getresgid=120, getgroups=115, getpgrp=111, getpgid=121, getsid=124,
    getpriority=140, getrlimit=97, prlimit64=302, getrusage=98, sysinfo=99, uname=63, sched_yield=24,
    sched_getaffinity=204, sched_getparam=143, sched_getscheduler=145, futex=202, set_robust_list=273,
    get_robust_list=274, set_tid_address=218, rseq=334, membarrier=324, arch_prctl=158, getrandom=318, exit=60,
    exit_group=231, wait4=61, waitid=247,
)  # fmt: skip
_CLOCKS = dict(
    nanosleep=35, clock_nanosleep=230, clock_gettime=228, clock_getres=229, gettimeofday=96, time=201, times=100,
    alarm=37, setitimer=38, getitimer=36, timer_create=222, timer_settime=223, timer_gettime=224,
    timer_getoverrun=225, timer_delete=226, timerfd_create=283, timerfd_settime=286, timerfd_gettime=287,
)  # fmt: skip
_MMAP = 9
_SETSOCKOPT = 54
_FCNTL = 72
_CLONE = 56
_IOCTL = 16
_PRCTL = 157
_SOCKETPAIR = 53
_CLONE_THREAD = 0x00010000
_MAP_SHARED = 0x01
_MAP_ANONYMOUS = 0x20
_PIPE_SIZE = (1031,)  # F_SETPIPE_SZ
_SOCKET_OPTIONS = 1  # SOL_SOCKET
_BUFFER_SIZES = (7, 8)  # SO_SNDBUF, SO_RCVBUF
# What may be asked of them. ioctl: TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX; prctl: PR_SET_NAME,
# PR_GET_NAME; socketpair: AF_UNIX. Each: number, position of the argument, values.
_LIMITED = (
    (_IOCTL, 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),
    (_PRCTL, 0, (15, 16)),
    (_SOCKETPAIR, 0, (1,)),
)

# What commands may not do.
_OTHERS_MEMORY = dict(ptrace=101, process_vm_readv=310, process_vm_writev=311, kcmp=312, pidfd_getfd=438,
    process_madvise=440, move_pages=279, migrate_pages=256)  # fmt: skip
_MOUNTS = dict(
    mount=165, umount2=166, pivot_root=155, chroot=161, open_tree=428, move_mount=429, fsopen=430, fsconfig=431,
    fsmount=432, fspick=433, mount_setattr=442, quotactl=179, quotactl_fd=443, name_to_handle_at=303,
    open_by_handle_at=304, fanotify_init=300, fanotify_mark=301,
)  # fmt: skip
_NAMESPACES = dict(unshare=272, setns=308, clone3=435)
_KERNEL = dict(
    init_module=175, finit_module=313, delete_module=176, create_module=174, kexec_load=246, kexec_file_load=320,
    reboot=169, bpf=321, perf_event_open=298, userfaultfd=323, io_uring_setup=425, io_uring_enter=426,
    io_uring_register=427, add_key=248, request_key=249, keyctl=250, syslog=103, acct=163, swapon=167, swapoff=168,
    sethostname=170, setdomainname=171, iopl=172, ioperm=173, settimeofday=164, clock_settime=227, adjtimex=159,
    clock_adjtime=305, lookup_dcookie=212, vhangup=153, modify_ldt=154, uselib=134, _sysctl=156, nfsservctl=180,
    personality=135, io_setup=206, sched_setaffinity=203, mbind=237, set_mempolicy=238, set_mempolicy_home_node=450,
)  # fmt: skip
# it belongs to no process, and none of the sums over processes would have it
_UNCOUNTED_MEMORY = dict(
    memfd_create=319, memfd_secret=447, semget=64, msgget=68, mq_open=240, vmsplice=278
)
_LAST = 450
_SOCKET = 41
# CLONE_PARENT, and all of CLONE_NEW...
_CLONE_ELSEWHERE = 0x7E028000
# Unix, IPv4, IPv6
_FAMILIES = (1, 2, 10)
# TIOCSTI, TIOCLINUX, TIOCSETD: input of a terminal as if it were typed, and its driver
_TERMINAL = (0x5412, 0x541C, 0x5423)

# of <linux/bpf_common.h>
_LOAD = 0x20
_EQUAL = 0x15
_ABOVE = 0x25
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ANSWER = 0x00050000  # and an error
# code, instructions to leave out if true, if false, operand
_Instruction = tuple[int, int, int, int]


def call_filter() -> bytes:
    """Returns the filter of a lone program, as an array of `struct sock_filter` in this machine's byte order."""
    program = [*_beginning(), *_bounded_memory()]
    for number in (*_FILES.values(), *_PROCESS.values(), *_CLOCKS.values()):
        program += _if_equal(number, _allowed())
    program += _if_equal(
        _CLONE,
        [*_argument(0), (_ANY_BIT, 0, 1, _CLONE_THREAD), *_allowed(), *_refused()],
    )
    for number, position, values in _LIMITED:
        program += _if_equal(
            number, [*_argument(position), *_if_one_of(values, _allowed()), *_refused()]
        )
    return _packed([*program, *_refused()])


def command_filter() -> bytes:
    """Returns the filter of a sandbox's commands, as `call_filter` does."""
    program = [*_beginning(), (_ABOVE, 0, 1, _LAST), *_refused(), *_bounded_memory()]
    for group in (_OTHERS_MEMORY, _MOUNTS, _NAMESPACES, _KERNEL, _UNCOUNTED_MEMORY):
        for number in group.values():
            program += _if_equal(number, _refused())
    elsewhere = [*_argument(0), (_ANY_BIT, 0, 1, _CLONE_ELSEWHERE), *_refused(), *_allowed()]
    program += _if_equal(_CLONE, elsewhere)
    none = _refused(errno.EAFNOSUPPORT)  # as a kernel without it, which `useradd` can do without
    families = [*_argument(0), *_if_one_of(_FAMILIES, _allowed()), *none]
    program += _if_equal(_SOCKET, families)
    program += _if_equal(_IOCTL, [*_argument(1), *_if_one_of(_TERMINAL, _refused()), *_allowed()])
    return _packed([*program, *_allowed()])


def _bounded_memory() -> list[_Instruction]:
    """Refuses memory that is shared and has no file: it stays where no process has it in its tables any more. Pipes keep
    the size that they have; so do buffers of sockets, which are only asked for."""
    shared = [(_ANY_BIT, 0, 2, _MAP_SHARED), (_ANY_BIT, 0, 1, _MAP_ANONYMOUS)]
    shared += [*_refused(errno.EOPNOTSUPP), *_number()]
    larger = [*_argument(1), *_if_one_of(_PIPE_SIZE, _refused(errno.EPERM)), *_number()]
    sizes = [*_argument(2), *_if_one_of(_BUFFER_SIZES, _refused(0))]
    buffers = [*_argument(1), *_if_equal(_SOCKET_OPTIONS, sizes), *_number()]
    return [
        *_if_equal(_MMAP, [*_argument(3), *shared]),
        *_if_equal(_FCNTL, larger),
        *_if_equal(_SETSOCKOPT, buffers),
    ]


def _packed(program: list[_Instruction]) -> bytes:
    return b"".join(struct.pack("HBBI", *step) for step in program)


def _beginning() -> list[_Instruction]:
    """Ends calls of other architectures, and loads the number of the call."""
    return [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, _ARCHITECTURE),
        (_RETURN, 0, 0, _KILL),
        *_number(),
    ]


def _number() -> list[_Instruction]:
    return [(_LOAD, 0, 0, 0)]


def _if_equal(value: int, then: list[_Instruction]) -> list[_Instruction]:
    return [(_EQUAL, 0, len(then), value), *then]


def _argument(position: int) -> list[_Instruction]:
    """Loads the lower half, all that these calls look at."""
    return [(_LOAD, 0, 0, 16 + 8 * position)]


def _if_one_of(values: tuple[int, ...], then: list[_Instruction]) -> list[_Instruction]:
    return [step for value in values for step in _if_equal(value, then)]


def _allowed() -> list[_Instruction]:
    return [(_RETURN, 0, 0, _ALLOW)]


def _refused(error: int = errno.ENOSYS) -> list[_Instruction]:
    return [(_RETURN, 0, 0, _ANSWER | error)]
