/* A tool for NVTX that writes every push and pop of a range into the file that RECORDED_RANGES names: one line each, with the thread.
 *
 * The layouts and numbers are those of NVIDIA's nvtxTypes.h and nvToolsExt.h, version 3. */

#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void (*function)(void);

struct attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char *message;
};

struct callbacks {
    size_t struct_size;
    int (*module_table)(uint32_t module, function ***table, unsigned int *size);
};

struct version_info {
    size_t struct_size;
    uint32_t version, reserved;
    void (*set_version)(uint32_t version);
};

static FILE *file;

static int push(const struct attributes *range)
{
    fprintf(file, "%ld push %d %d %d %d %08x %s\n", syscall(SYS_gettid), range->version, range->size == sizeof *range,
            range->color_type, range->message_type, range->color, range->message);
    return 0;
}

static int pop(void)
{
    fprintf(file, "%ld pop\n", syscall(SYS_gettid));
    return 0;
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t id))
{
    const struct callbacks *callbacks = export_table(1);
    const struct version_info *version = export_table(3);
    function **table = NULL;
    unsigned int size = 0;
    const char *path = getenv("RECORDED_RANGES");
    if (!callbacks || callbacks->struct_size != sizeof *callbacks || !version || version->version != 3 || export_table(9))
        return 0;
    version->set_version(3);
    /* There are modules 1 to 6, which all end with a null. */
    for (uint32_t module = 0; module < 9; module++) {
        int is_there = callbacks->module_table(module, &table, &size);
        if (is_there != (module >= 1 && module <= 6) || (is_there && (table[0] || !table[1] || !table[size - 1] || table[size])))
            return 0;
    }
    if (!path || !(file = fopen(path, "a")) || !callbacks->module_table(1, &table, &size) || size != 16)
        return 0;
    setvbuf(file, NULL, _IOLBF, 0);
    *table[8] = (function)push;
    *table[11] = (function)pop;
    return 1;
}
