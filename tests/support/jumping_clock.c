// Preloaded into a process, makes its wall clock jump by an hour back and forth, every second.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <time.h>

typedef int (*clock_call)(clockid_t, struct timespec*);

int clock_gettime(clockid_t clock, struct timespec* t) {
    static clock_call real;
    if (!real) real = (clock_call)dlsym(RTLD_NEXT, "clock_gettime");
    const int result = real(clock, t);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        if (t->tv_sec % 2) t->tv_sec += t->tv_sec % 4 == 1 ? 3600 : -3600;
    return result;
}

int gettimeofday(struct timeval* t, void* zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t* out) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out) *out = now.tv_sec;
    return now.tv_sec;
}
