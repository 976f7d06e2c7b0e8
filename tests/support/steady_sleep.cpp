// Preloaded before libfaketime. Version 0.9.10 refuses a sleep until a time of the monotonic clock with
// EINVAL where that clock is not faked; this passes every sleep to the kernel.
#include <sys/syscall.h>
#include <unistd.h>
#include <cerrno>
#include <ctime>

extern "C" int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
    const int before = errno;
    const int error = syscall(SYS_clock_nanosleep, clock, flags, time, left) == 0 ? 0 : errno;
    errno = before;
    return error;
}
