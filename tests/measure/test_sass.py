"""Instruction statistics on a few lines of SASS whose counts are known."""

from labkit.measure import SassStats

SASS = """
	code for sm_90a
		Function : _k
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R4, SR_TID.X ;                                  /* 0x0000000000047919 */
        /*0020*/              @!P0 LDG.E.EF.128 R60, desc[UR20][R190.64] ;
        /*0030*/               @P3 LDG.E.128.CONSTANT R4, [R2.64] ;
        /*0040*/                   LDG.E.U16 R9, desc[UR18][R24.64] ;
        /*0050*/                   LDG.E R9, desc[UR18][R24.64] ;
        /*0060*/             @!UP1 UBLKCP.S.G [UR4], [UR6], UR8 ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0080*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0090*/                   MUFU.EX2 R4, R4 ;
        /*00a0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00b0*/                   STL.64 [R1], R2 ;
        /*00c0*/                   FFMA R1, R2, R3, R4 ;
        /*00d0*/                   EXIT ;
        /*10e0*/                   NOP;
.L_x_1:
"""


def test_counts_go_by_stem_and_modifiers():
    stats = SassStats.parse(SASS)
    assert len(stats.opcodes) == 14
    assert stats.count("LDG") == 4 and stats.count("LDG.E.128") == stats.count("LDG.128") == 2
    assert stats.count("LDG.E.128.CONSTANT") == 1 and stats.count("LDG.E.U16") == 1 and stats.count("LD") == 0
    assert stats.count("UBLKCP") == stats.count("EXIT") == stats.count("MUFU.EX2") == 1 and stats.count("MUFU.RCP") == 0


def test_the_table_is_stable():
    assert SassStats.parse(SASS).summary() == "\n".join(
        [
            "group                     opcode                 count",
            "global memory             LDG                        1",
            "                          LDG.128                    2",
            "                          LDG.U16                    1",
            "                          UBLKCP                     1",
            "local memory (spills)     STL.64                     1",
            "tensor cores              HMMA.16816                 1",
            "                          HGMMA.64x128x16            1",
            "special functions         MUFU.EX2                   1",
            "synchronisation           BAR.SYNC                   1",
            "control                   EXIT                       1",
            "arithmetic and addresses                             3",
            "all                                                 14",
        ]
    )


def test_nothing_gives_an_empty_table():
    assert SassStats.parse("").summary().endswith(f"{'all':<48}{0:>6}")
